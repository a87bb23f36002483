"""A quick reader for the usual part of protobuf's text format.

`text_format` calls its tokenizer several times for each token, which takes most of the time to read a repository of
thousands of models. This module splits the text into tokens at once. It leaves unusual and wrong texts to
`text_format`, which alone decides what a configuration is, and words the errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_TOKEN = re.compile(r"""\#[^\n]*|"[^"\\\n]*"|'[^'\\\n]*'|[{}\[\]:;,]|[^\s{}<>\[\]:;,"'\#]+|\S""")
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")
_REAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


class _NotPlain(Exception):
    """The text needs `text_format`."""


class _Field(NamedTuple):
    """The values that a field may have.

    Attributes:
        read: makes the value of a scalar of its token.
        fields: of a message, by name.
        is_repeated: there may be several values; of a map, too.
        value: of a map, the field of its values; its keys are strings.
        group: its oneof, of which one field may be set, or the field itself.
    """

    read: Callable[[str], object] | None
    fields: Mapping[str, _Field]
    is_repeated: bool
    value: _Field | None
    group: str


def merge(text: str, message: Message) -> bool:
    """Fill an empty message from the text, in which no key of a map is written twice.

    Returns:
        Whether the whole text was usual; otherwise the message is filled in part.
    """
    tokens = _TOKEN.findall(text)
    if "#" in text:
        tokens = [token for token in tokens if token[0] != "#"]
    tokens.reverse()
    try:
        _merge(message, _fields(message.DESCRIPTOR), tokens, "")
    except (_NotPlain, IndexError, ValueError, TypeError):
        return False
    return True


def _merge(message: Message, fields: Mapping[str, _Field], left: list[str], end: str) -> None:
    """Fill a message from the tokens up to and including this one; "" is the end of the text.

    Args:
        left: the next one at the end.
    """
    seen = set()
    while left:
        name = left.pop()
        if name == end:
            return
        field = fields.get(name)
        if field is None:
            raise _NotPlain
        if not field.is_repeated:
            if field.group in seen:
                raise _NotPlain
            seen.add(field.group)
        token = left.pop()
        if token == ":":
            token = left.pop()
        elif field.read is not None:
            raise _NotPlain
        if field.is_repeated and token == "[":
            _merge_list(message, name, field, left)
        else:
            _merge_value(message, name, field, token, left)
        if left and left[-1] in ",;":
            left.pop()
    if end:
        raise _NotPlain


def _merge_list(message: Message, name: str, field: _Field, left: list[str]) -> None:
    token = left.pop()
    while token != "]":
        _merge_value(message, name, field, token, left)
        token = left.pop()
        if token == ",":
            token = left.pop()
            if token == "]":
                raise _NotPlain
        elif token != "]":
            raise _NotPlain


def _merge_value(message: Message, name: str, field: _Field, token: str, left: list[str]) -> None:
    if field.read is not None:
        value = field.read(token)
        if field.is_repeated:
            getattr(message, name).append(value)
        else:
            setattr(message, name, value)
        if token[0] in "\"'" and left and left[-1][0] in "\"'":
            raise _NotPlain  # both are parts of one text
        return
    if token != "{":
        raise _NotPlain
    place: Any = getattr(message, name)
    if field.value is not None:
        _merge_entry(place, field.value, left)
    elif field.is_repeated:
        _merge(place.add(), field.fields, left, "}")
    else:
        place.SetInParent()
        _merge(place, field.fields, left, "}")


def _merge_entry(place: Any, value: _Field, left: list[str]) -> None:
    """One of a map: its key, then its value."""
    if left.pop() != "key" or left.pop() != ":":
        raise _NotPlain
    key = _text(left.pop())
    if left[-1] in ",;":
        left.pop()
    if key in place or left.pop() != "value":
        raise _NotPlain
    token = left.pop()
    if token == ":":
        token = left.pop()
    elif value.read is not None:
        raise _NotPlain
    if value.read is not None:
        place[key] = value.read(token)
    elif token == "{":
        _merge(place[key], value.fields, left, "}")
    else:
        raise _NotPlain
    if left[-1] in ",;":
        left.pop()
    if left.pop() != "}":
        raise _NotPlain


# ---- values of fields -------------------------------------------------------------------------------------------


@cache
def _fields(descriptor: Descriptor) -> dict[str, _Field]:
    """Of a message, by name."""
    return {field.name: _field(field) for field in descriptor.fields}


def _field(field: FieldDescriptor) -> _Field:
    group = field.containing_oneof.name if field.containing_oneof is not None else field.name
    message = field.message_type
    if message is None:
        return _Field(_reader(field), {}, field.is_repeated, None, group)
    if not message.GetOptions().map_entry:
        return _Field(None, _fields(message), field.is_repeated, None, group)
    key, value = (message.fields_by_name[name] for name in ("key", "value"))
    if key.type != FieldDescriptor.TYPE_STRING:
        return _Field(_refused, {}, False, None, group)
    return _Field(None, {}, True, _field(value), group)


def _reader(field: FieldDescriptor) -> Callable[[str], object]:
    kinds: dict[int, Callable[[str], object]] = {
        FieldDescriptor.CPPTYPE_INT32: _whole,
        FieldDescriptor.CPPTYPE_INT64: _whole,
        FieldDescriptor.CPPTYPE_UINT32: _whole,
        FieldDescriptor.CPPTYPE_UINT64: _whole,
        FieldDescriptor.CPPTYPE_FLOAT: _real,
        FieldDescriptor.CPPTYPE_DOUBLE: _real,
        FieldDescriptor.CPPTYPE_BOOL: _truth,
    }
    if field.enum_type is not None:
        numbers = {each.name: each.number for each in field.enum_type.values}
        return lambda token: _known(numbers, token)
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text
    return kinds.get(field.cpp_type, _refused)


def _text(token: str) -> str:
    if len(token) < 2 or token[0] not in "\"'":
        raise _NotPlain
    return token[1:-1]


def _whole(token: str) -> int:
    if not _WHOLE.fullmatch(token):
        raise _NotPlain
    return int(token)


def _real(token: str) -> float:
    if not _REAL.fullmatch(token):
        raise _NotPlain
    return float(token)


def _truth(token: str) -> bool:
    if token not in ("true", "false"):
        raise _NotPlain
    return token == "true"


def _known(numbers: Mapping[str, int], token: str) -> int:
    number = numbers.get(token)
    if number is None:
        raise _NotPlain
    return number


def _refused(_: str) -> object:
    raise _NotPlain
