"""Reads protobuf's text format into a message, and finds the line of each field.

`text_format` calls its tokenizer several times for each token, which takes most of the time to read a repository of
thousands of models, and it keeps no positions. This module splits the text into tokens at once. A text that it cannot
read is left to `text_format`, which alone decides what a configuration is, and words the errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

from google.protobuf import message_factory, text_encoding, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

FieldPath = tuple[str | int, ...]
"""Names of fields, each followed by its index if it is repeated, its key if it is a map: ("input", 0, "dims", 1)."""

TOKEN = re.compile(r"""\#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[{}<>\[\]:;,]|[^\s{}<>\[\]:;,"'\#]+|\S""")
QUOTES = "\"'"
CLOSING = {"{": "}", "<": ">"}
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")
TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class DuplicateKey:
    """A map key that was written twice."""

    field: str
    key: str
    line: int
    first_line: int


@dataclass(slots=True)
class Positions:
    """The line of each field, and the keys of maps that were written twice."""

    lines: dict[FieldPath, int] = field(default_factory=dict)
    duplicates: list[DuplicateKey] = field(default_factory=list)


class _Token(str):
    """A token that knows its line."""

    __slots__ = ("line",)
    line: int


class _Unreadable(Exception):
    """The text is left to `text_format`."""


class _Field(NamedTuple):
    """The values that a field may have.

    Attributes:
        read: makes the value of a scalar of its token.
        fields: of a message, by name; of a map, those of its entries.
        is_repeated: there may be several values; of a map, too.
        entry: of a map, makes an entry.
        group: its oneof, of which one field may be set, or the field itself.
    """

    read: Callable[[str], Any] | None
    fields: Mapping[str, _Field]
    is_repeated: bool
    entry: Callable[[], Any] | None
    group: str


def merge(text: str, message: Message) -> bool:
    """Fill an empty message from the text, in which no key of a map is written twice.

    Returns:
        Whether the whole text could be read; otherwise the message is filled in part.
    """
    return _read(TOKEN.findall(text), message, None)


def locate(text: str, message: Message) -> Positions:
    """The positions in the text; those before the first error, if there is one. It fills the empty message."""
    tokens, line, done = [], 1, 0
    for found in TOKEN.finditer(text):
        line, done = line + text.count("\n", done, found.start()), found.start()
        tokens.append(token := _Token(found.group()))
        token.line = line
    positions = Positions()
    _read(tokens, message, positions)
    return positions


def _read(tokens: list[Any], message: Message, found: Positions | None) -> bool:
    left = [token for token in reversed(tokens) if token[0] != "#"]
    try:
        _merge(message, _fields(message.DESCRIPTOR), left, "", (), found)
    except (_Unreadable, IndexError, ValueError, TypeError):
        return False
    return True


def _merge(
    message: Any, fields: Mapping[str, _Field], left: list[Any], end: str, path: FieldPath, found: Positions | None
) -> None:
    """Fill a message from the tokens up to and including this one; "" is the end of the text.

    Args:
        left: tokens, the next one at the end; with their lines if positions are wanted.
        path: of the message.
        found: gets the positions.
    """
    seen = set()
    while left:
        name = left.pop()
        if name == end:
            return
        about = fields.get(name)
        if about is None:
            raise _Unreadable
        if not about.is_repeated:
            if about.group in seen:
                raise _Unreadable
            seen.add(about.group)
        token = left.pop()
        if token == ":":
            token = left.pop()
        elif about.read is not None:
            raise _Unreadable
        if found is not None:
            path = (*path, str(name))
            found.lines.setdefault(path, name.line)
        if not about.is_repeated:
            if about.read is not None:
                value = about.read(token)
                if token[0] in QUOTES and left and left[-1][0] in QUOTES:
                    value += _more(about.read, left)
                setattr(message, name, value)
            else:
                place = getattr(message, name)
                place.SetInParent()
                _merge(place, about.fields, left, _closing(token), path, found)
        elif token == "[":
            _add_list(getattr(message, name), about, left, path, found)
        else:
            _add(getattr(message, name), about, token, left, path, found, name)
        if found is not None:
            path = path[:-1]
        if left and left[-1] in ",;":
            left.pop()
    if end:
        raise _Unreadable


def _add_list(place: Any, about: _Field, left: list[Any], path: FieldPath, found: Positions | None) -> None:
    token = left.pop()
    while token != "]":
        _add(place, about, token, left, path, found, token)
        token = left.pop()
        if token == ",":
            token = left.pop()
            if token == "]":
                raise _Unreadable
        elif token != "]":
            raise _Unreadable


def _add(
    place: Any, about: _Field, token: str, left: list[Any], path: FieldPath, found: Positions | None, at: Any
) -> None:
    """Add one value to a repeated field or a map; `at` is the token whose line is the value's."""
    if about.entry is not None:
        _add_entry(place, about, token, left, path, found, at)
        return
    if found is not None:
        path = (*path, len(place))
        found.lines[path] = at.line
    if about.read is None:
        _merge(place.add(), about.fields, left, _closing(token), path, found)
    else:
        value = about.read(token)
        if token[0] in QUOTES and left and left[-1][0] in QUOTES:
            value += _more(about.read, left)
        place.append(value)


def _add_entry(
    place: Any, about: _Field, token: str, left: list[Any], path: FieldPath, found: Positions | None, at: Any
) -> None:
    """Add an entry to a map: its key and its value may come in any order."""
    assert about.entry is not None
    entry, inner = about.entry(), None if found is None else Positions()
    _merge(entry, about.fields, left, _closing(token), (), inner)
    key = entry.key
    if found is not None and inner is not None:
        here = (*path, str(key))
        first = found.lines.setdefault(here, at.line)
        if key in place:
            found.duplicates.append(DuplicateKey(str(path[-1]), str(key), at.line, first))
        for of, line in inner.lines.items():
            if of[0] == "value" and len(of) > 1:
                found.lines[(*here, *of[1:])] = line
    elif key in place:
        raise _Unreadable
    if about.fields["value"].read is None:
        place[key].CopyFrom(entry.value)
    else:
        place[key] = entry.value


def _more(read: Callable[[str], Any], left: list[Any]) -> Any:
    """The texts that follow: neighbouring ones are one."""
    value = read(left.pop())
    while left and left[-1][0] in QUOTES:
        value += read(left.pop())
    return value


def _closing(token: str) -> str:
    closing = CLOSING.get(token)
    if closing is None:
        raise _Unreadable
    return closing


# ---- fields and their values ----------------------------------------------------------------------------------------


@cache
def _fields(descriptor: Descriptor) -> dict[str, _Field]:
    """The fields of a message, by name."""
    return {each.name: _field(each) for each in descriptor.fields}


def _field(described: FieldDescriptor) -> _Field:
    group = described.containing_oneof.name if described.containing_oneof is not None else described.name
    message = described.message_type
    if message is None:
        return _Field(_reader(described), {}, described.is_repeated, None, group)
    entry = message_factory.GetMessageClass(message) if message.GetOptions().map_entry else None
    return _Field(None, _fields(message), described.is_repeated, entry, group)


def _reader(described: FieldDescriptor) -> Callable[[str], Any]:
    """Reads a value of the field: usual ones at once, any other as `text_format` does."""
    if described.enum_type is not None:
        numbers = {each.name: each.number for each in described.enum_type.values}
        other: Callable[[str], Any] = partial(text_format.ParseEnum, described)
        return lambda token: other(token) if (found := numbers.get(token)) is None else found
    match described.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return _text if described.type == FieldDescriptor.TYPE_STRING else _bytes
        case FieldDescriptor.CPPTYPE_BOOL:
            return lambda token: TRUTH[token] if token in TRUTH else text_format.ParseBool(token)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return text_format.ParseFloat
    return _whole


def _text(token: str) -> str:
    if "\\" in token or token[0] not in QUOTES or len(token) < 2:
        return _bytes(token).decode()
    return token[1:-1]


def _bytes(token: str) -> bytes:
    if token[0] not in QUOTES or len(token) < 2:
        raise _Unreadable
    return text_encoding.CUnescape(token[1:-1])


def _whole(token: str) -> int:
    if WHOLE.fullmatch(token):
        return int(token)
    return text_format.ParseInteger(token, is_signed=True, is_long=True)
