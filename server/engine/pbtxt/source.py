"""The position of each field in a config.pbtxt, for errors with file and line.

protobuf's text_format keeps no positions, and silently keeps the last of two map entries with one key. This module
reads the same text a second time, after text_format has accepted it, only for positions; so it may assume a well-formed
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

FieldPath = tuple[str | int, ...]
"""Names of fields, each followed by its index if it is repeated, its key if it is a map: ("input", 0, "dims", 1)."""

TOKEN = re.compile(
    r"""\s+ | \#[^\n]*
      | (?P<text> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' )
      | (?P<mark> [{}<>\[\]:;,] )
      | (?P<word> [^\s{}<>\[\]:;,"'\#]+ )""",
    re.VERBOSE | re.DOTALL,
)
CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class DuplicateKey:
    """A map key that was written twice."""

    field: str
    key: str
    line: int
    first_line: int


@dataclass(slots=True)
class _Positions:
    lines: dict[FieldPath, int] = field(default_factory=dict)
    duplicates: list[DuplicateKey] = field(default_factory=list)


@dataclass(slots=True)
class Source:
    """A configuration file and the line of every field in it, found at the first request."""

    path: Path | str  # a text if it is no path of this machine
    text: str = ""
    message: Descriptor | None = None  # the type of the text's message
    from_client: bool = False  # the configuration came with a client's load request
    _positions: _Positions | None = None

    @property
    def lines(self) -> dict[FieldPath, int]:
        """By field."""
        return self._found().lines

    @property
    def duplicates(self) -> list[DuplicateKey]:
        """Keys of maps that were written twice."""
        return self._found().duplicates

    def _found(self) -> _Positions:
        if self._positions is None:
            self._positions = _Positions()
            if self.message is not None:
                _Walker(self.text, self._positions).message(self.message, (), closing="")
        return self._positions

    def has(self, *path: str | int) -> bool:
        """Whether the field was written, even with its default value."""
        return str(path[0]) in self.text and path in self.lines

    def keep(self, name: str, indexes: Sequence[int]) -> None:
        """Keep only these values, ascending, of a repeated field: the others were removed from the configuration."""
        now = {index: place for place, index in enumerate(indexes)}
        lines: dict[FieldPath, int] = {}
        for path, line in self.lines.items():
            if path[0] != name or len(path) == 1:
                lines[path] = line
            elif isinstance(path[1], int) and path[1] in now:
                lines[(name, now[path[1]], *path[2:])] = line
        self._found().lines = lines

    def at(self, *path: str | int) -> str:
        """`file:line` of the field or of its nearest written parent; the file alone if there is none."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.path}:{self.lines[path]}" if path else str(self.path)


NOWHERE = Source(Path("config.pbtxt"))
"""For a configuration that came from no file."""


def locate(path: Path, text: str, message: Descriptor) -> Source:
    """The file of this `text`, which text_format has accepted as a `message`."""
    return Source(path, text, message)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    line: int
    is_mark: bool = False


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for found in TOKEN.finditer(text):
        if found.lastgroup:
            yield _Token(found.group(), line, is_mark=found.lastgroup == "mark")
        line += found.group().count("\n")


class _Walker:
    """Follows the fields of a message through the tokens."""

    def __init__(self, text: str, found: _Positions) -> None:
        self._tokens = [*_tokens(text), _Token("", 0, is_mark=True)]
        self._next = 0
        self._found = found
        self._counts: dict[FieldPath, int] = {}

    def message(self, descriptor: Descriptor, path: FieldPath, closing: str) -> None:
        """All fields up to and including the closing bracket."""
        while not self._take(closing):
            name = self._pop()
            found = descriptor.fields_by_name.get(name.text)
            if found is None:
                return  # an extension, which text_format accepts: configurations have none
            self._take(":")
            self._values(found, (*path, name.text), name.line)
            _ = self._take(";") or self._take(",")

    def _values(self, found: FieldDescriptor, path: FieldPath, line: int) -> None:
        self._found.lines.setdefault(path, line)
        if not self._take("["):
            self._value(found, path, line)
            return
        while not self._take("]"):
            self._value(found, path, self._peek().line)
            self._take(",")

    def _value(self, found: FieldDescriptor, path: FieldPath, line: int) -> None:
        if found.is_repeated and not _is_map(found):
            index = self._counts.get(path, 0)
            self._counts[path] = index + 1
            path = (*path, index)
            self._found.lines[path] = line
        if not found.message_type:
            self._scalar()
        elif _is_map(found):
            self._entry(found, path, line)
        else:
            self.message(found.message_type, path, CLOSING[self._pop().text])

    def _entry(self, found: FieldDescriptor, path: FieldPath, line: int) -> None:
        """`{ key: "x" value: ... }`; the value's fields are placed under the key."""
        assert found.message_type is not None
        value_field = found.message_type.fields_by_name["value"]
        closing = CLOSING[self._pop().text]
        key = ""
        start = self._next
        for wanted in ("key", "value"):  # in the text they come in any order, but the key is needed first
            self._next = start
            while not self._take(closing):
                name = self._pop()
                self._take(":")
                if name.text != wanted:
                    self._skip()
                elif wanted == "key":
                    key = self._scalar()
                else:
                    self._value(value_field, (*path, key), name.line)
                _ = self._take(";") or self._take(",")
        first = self._found.lines.setdefault((*path, key), line)
        if self._counts.setdefault((*path, key), self._next) != self._next:
            self._found.duplicates.append(DuplicateKey(str(path[-1]), key, line, first))

    def _skip(self) -> None:
        """One value of any kind."""
        opening = self._peek()
        if not opening.is_mark:
            self._scalar()
            return
        depth = 0
        while True:
            token = self._pop()
            if token.is_mark and token.text in "{<[":
                depth += 1
            elif token.is_mark and token.text in "}>]":
                depth -= 1
            if depth == 0:
                return

    def _scalar(self) -> str:
        """A scalar without its quotes; neighbouring strings are one."""
        parts = [self._pop().text]
        while parts[0][0] in "\"'" and self._peek().text[:1] in ("'", '"'):
            parts.append(self._pop().text)
        return "".join(part[1:-1] if part[0] in "\"'" else part for part in parts)

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _pop(self) -> _Token:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _take(self, mark: str) -> bool:
        """Take the next token if it is this mark; "" is the end of the text."""
        token = self._peek()
        if not token.is_mark or token.text != mark:
            return False
        self._next += 1
        return True


def _is_map(found: FieldDescriptor) -> bool:
    return bool(found.message_type and found.message_type.GetOptions().map_entry)
