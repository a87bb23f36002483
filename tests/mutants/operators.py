"""What a mutant changes. Each operator makes all mutants of its kind of one source; nobody chooses among them.

| operator | what it changes |
|---|---|
| `delete` | a statement is `pass` |
| `return` | an early return is skipped |
| `compare` | `<` is `<=`, `>` is `>=`, `==` is `!=`, and the other way round |
| `half` | of `a and b`, or `a or b`, one is left |
| `swap` | two calls, one behind the other, change places |
| `constant` | a whole number is larger or smaller by one |

Only code of functions is changed. Declarations stay, and so do assertions, which check the code themselves. Where the
result of a function only tells of an exception (each `return` of it returns 0), that 0 is no constant to change.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.mutants.tokens import Statement, Token, statements_of

OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
DECLARED = {"cdef", "cpdef", "ctypedef", "cimport", "import", "from", "global", "nonlocal", "def", "class", "@"}
KEPT = frozenset(DECLARED | {"pass", "assert", "..."})
ASSERTIONS = {"assert_that", "assert_move"}  # of inferd._native.assertion
# What binds less than `and` and `or`, and so ends an operand of them.
WORDS = {"if", "elif", "else", "while", "for", "return", "yield", "raise", "assert", "lambda"}
LOOSER = frozenset(WORDS | {"=", ":=", ",", ":", "+=", "-=", "|=", "&=", "^=", "->"})
NO_CALLS = KEPT | {"raise", "del", "yield", "await", "with", "if", "while", "for"}
INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)")


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        file: from the root of the tree.
        line: where it begins.
        before, after: the statements that it changes, without and with it.
        nth: of those in this function that read the same.
        start, end, text: the place in the source, and what stands there instead.
    """

    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    nth: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """The name of the mutant, which does not depend on the lines above it."""
        identity = "\0".join((self.file, self.function, self.before, self.after, str(self.nth)))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def apply(self, source: str) -> str:
        """The source with the change."""
        return source[: self.start] + self.text + source[self.end :]


@dataclass(frozen=True)
class Edit:
    """An edit that an operator makes: a text for a place, in these statements."""

    operator: str
    start: int
    end: int
    text: str
    statements: tuple[Statement, ...]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All of one source, in its order; of those that would make the same source, the first."""
    made: list[Mutant] = []
    seen: set[str] = set()
    same: Counter[tuple[str, str, str]] = Counter()
    for edit in sorted(edits_of(source), key=lambda edit: (edit.start, edit.end, edit.operator, edit.text)):
        changed = source[: edit.start] + edit.text + source[edit.end :]
        if changed in seen or changed == source:
            continue
        seen.add(changed)
        begin, end = edit.statements[0].start, edit.statements[-1].end
        before = source[begin:end]
        after = changed[begin : end + len(edit.text) - (edit.end - edit.start)]
        function = edit.statements[0].function
        nth = same[function, before, after]
        same[function, before, after] += 1
        line = edit.statements[0].line + source.count("\n", begin, edit.start)
        made.append(
            Mutant(file, line, function, edit.operator, before, after.rstrip(), nth, edit.start, edit.end, edit.text)
        )
    return made


def edits_of(source: str) -> Iterator[Edit]:
    """The edits of all operators."""
    statements = [each for each in statements_of(source) if each.function and each.first not in ASSERTIONS]
    silent = silent_functions(statements)
    for statement in statements:
        if statement.is_function:
            continue
        yield from deleted(source, statement)
        yield from compared(statement)
        yield from halved(statement)
        if not (statement.function in silent and statement.first == "return"):
            yield from counted(statement)
    yield from swapped(source, statements)


def silent_functions(statements: list[Statement]) -> set[str]:
    """The functions whose every return gives 0, which tells at most of an exception."""
    given: dict[str, set[str]] = defaultdict(set)
    for statement in statements:
        if statement.first == "return":
            given[statement.function].add(" ".join(token.text for token in statement.tokens[1:]))
    return {function for function, values in given.items() if values == {"0"}}


def deleted(source: str, statement: Statement) -> Iterator[Edit]:
    """Without the statement. Lines stay where they are, for the numbers that the code made of them has in it."""
    if statement.is_header:
        return
    nothing = "pass" + "\n" * source.count("\n", statement.start, statement.end)
    if statement.first == "return" and not statement.is_last:
        yield Edit("return", statement.start, statement.end, nothing, (statement,))
    elif statement.first == "return" or not (statement.first in KEPT or statement.tokens[0].kind == "string"):
        yield Edit("delete", statement.start, statement.end, nothing, (statement,))


def code_of(statement: Statement) -> list[Token]:
    """The tokens of a statement that are code: of a declaration, those behind `=`."""
    if statement.first not in ("cdef", "cpdef"):
        return [] if statement.first in KEPT else statement.tokens
    for index, token in enumerate(statement.tokens):
        if token.text == "=" and token.depth == 0:
            return statement.tokens[index:]
    return []


def compared(statement: Statement) -> Iterator[Edit]:
    """With another comparison."""
    code = code_of(statement)
    in_cast = False
    for before, token in itertools.pairwise(code):
        if token.kind != "operator" or token.text not in OPPOSITE:
            continue
        if token.text == "<" and not before.is_operand:
            in_cast = True
        elif token.text == ">" and in_cast:
            in_cast = False
        else:
            yield Edit("compare", token.start, token.end, OPPOSITE[token.text], (statement,))


def halved(statement: Statement) -> Iterator[Edit]:
    """With one side of an `and` or `or`."""
    code = code_of(statement)
    for index, token in enumerate(code):
        if token.kind == "name" and token.text in ("and", "or"):
            left = operand(code[:index][::-1], token)
            right = operand(code[index + 1 :], token)
            if left and right:
                yield Edit("half", left[-1].start, right[0].start, "", (statement,))
                yield Edit("half", left[0].end, right[-1].end, "", (statement,))


def operand(tokens: list[Token], of: Token) -> list[Token]:
    """The operand that `tokens`, which begin beside the operator, begin with."""
    looser = LOOSER | {"or"} | ({"and"} if of.text == "and" else set())
    found: list[Token] = []
    for token in tokens:
        if token.depth < of.depth or (token.depth == of.depth and token.text in looser and token.kind != "string"):
            break
        found.append(token)
    return found


def swapped(source: str, statements: list[Statement]) -> Iterator[Edit]:
    """Two calls that stand one behind the other."""
    for one, two in itertools.pairwise(statements):
        if one.function == two.function and one.indent == two.indent and is_call(one) and is_call(two):
            between = source[one.end : two.start]
            text = source[two.start : two.end] + between + source[one.start : one.end]
            yield Edit("swap", one.start, two.end, text, (one, two))


def is_call(statement: Statement) -> bool:
    """Whether the statement is a call, and nothing else."""
    tokens = statement.tokens
    if tokens[0].kind != "name" or tokens[0].text in NO_CALLS or tokens[-1].text != ")":
        return False
    outer = [token for token in tokens if token.depth == 0]
    names = outer[:-2]
    return [token.text for token in outer[-2:]] == ["(", ")"] and all(
        token.kind == "name" if index % 2 == 0 else token.text == "." for index, token in enumerate(names)
    )


def counted(statement: Statement) -> Iterator[Edit]:
    """With a number that is one more, or one less where that is none below zero."""
    for token in code_of(statement):
        whole = INTEGER.fullmatch(token.text) if token.kind == "number" else None
        if whole is None:
            continue
        value, suffix = int(whole[1], 0), whole[2]
        for other in (value + 1, value - 1):
            if other >= 0:
                yield Edit("constant", token.start, token.end, f"{other}{suffix}", (statement,))
