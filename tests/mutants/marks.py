"""Marks in native sources: each statement notes, in a file that all processes share, that it was reached.

A mark is `mutants_reached(n)` in the line before a statement: one byte is set. Where `MUTANTS_REACHED` names no folder,
nothing is noted.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from tests.mutants.operators import KEPT
from tests.mutants.tokens import Statement, statements_of

FOLDER = "MUTANTS_REACHED"  # in it, a file for each module
CONTINUED = ("elif", "else", "except", "finally")  # no statement may stand before them
UNMARKED = KEPT - {"cdef", "cpdef", "pass", "assert"} | {"async"}

DECLARED = '''

cdef extern from *:
    """
    #include <fcntl.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <unistd.h>
    static unsigned char reached_by_nobody[COUNT];
    static unsigned char *reached = reached_by_nobody;
    __attribute__((constructor)) static void map_reached(void) {
        char path[4096];
        const char *folder = getenv("FOLDER");
        if (folder == NULL)
            return;
        snprintf(path, sizeof(path), "%s/MODULE", folder);
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, COUNT))
            return;
        void *at = mmap(NULL, COUNT, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (at != MAP_FAILED)
            reached = at;
    }
    #define mutants_reached(n) (*(volatile unsigned char *)&reached[n] = 1)
    """
    void mutants_reached(int n) noexcept nogil
'''


class Marks:
    """The marks of one source.

    Args:
        source: its text.
        first: the number of the first mark.
    """

    def __init__(self, source: str, first: int = 0) -> None:
        self.first = first
        self.count = 0
        self._source = source
        self._starts: list[int] = []
        self._numbers: list[int] = []
        self._places: list[tuple[int, int]] = []  # of a line, and the number in front of it
        last: dict[tuple[str, int], int] = {}  # by function and indent: the last mark there
        for statement in statements_of(source):
            if not statement.function or statement.is_function:
                continue
            where = statement.function, statement.indent
            if statement.first in CONTINUED:
                self._note(statement, last[where])
            elif is_marked(statement):
                last[where] = first + self.count
                self._places.append((statement.start, last[where]))
                self._note(statement, last[where])
                self.count += 1

    def _note(self, statement: Statement, number: int) -> None:
        self._starts.append(statement.start)
        self._numbers.append(number)

    def number(self, place: int) -> int:
        """The mark of the statement at this place of the source; negative: it has none."""
        index = bisect_right(self._starts, place) - 1
        return self._numbers[index] if index >= 0 else -1

    def text(self) -> str:
        """The source with them."""
        parts, since = [], 0
        for start, number in self._places:
            indent = start - (self._source.rfind("\n", 0, start) + 1)
            parts += [self._source[since:start], f"mutants_reached({number})\n{' ' * indent}"]
            since = start
        return "".join([*parts, self._source[since:]])


def is_marked(statement: Statement) -> bool:
    """Whether a statement may stand before it, and it does something."""
    return not (statement.first in UNMARKED or statement.tokens[0].kind == "string")


def declared(module: str, count: int) -> str:
    """The text at the end of a module's source when the module has so many marks."""
    return DECLARED.replace("COUNT", str(max(1, count))).replace("FOLDER", FOLDER).replace("MODULE", module)


def take(folder: Path) -> dict[str, bytes]:
    """The marks that were reached since the last time, a byte for each, by module."""
    found = {}
    for path in folder.iterdir():
        with path.open("r+b") as file:
            data = file.read()
            if any(data):
                found[path.name] = data
                file.seek(0)
                file.write(bytes(len(data)))
    return found
