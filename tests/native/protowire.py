"""Hand-made protobuf: the pieces of a message as bytes, well-formed or not."""

from collections.abc import Iterator

VARINT, FIXED64, LEN, GROUP, END_GROUP, FIXED32 = range(6)


def varint(value: int, size: int = 0) -> bytes:
    """`value` as a varint, padded to `size` bytes when its shortest form is shorter."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    while len(out) < size:
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def tag(field: int, wire_type: int, size: int = 0) -> bytes:
    return varint(field << 3 | wire_type, size)


def number(field: int, value: int, size: int = 0) -> bytes:
    """A varint field."""
    return tag(field, VARINT) + varint(value, size)


def run(field: int, *bodies: bytes) -> bytes:
    """A length-delimited field."""
    body = b"".join(bodies)
    return tag(field, LEN) + varint(len(body)) + body


def packed(field: int, *values: int) -> bytes:
    return run(field, *map(varint, values))


def group(field: int, *bodies: bytes) -> bytes:
    return tag(field, GROUP) + b"".join(bodies) + tag(field, END_GROUP)


def groups(depth: int, field: int = 100) -> bytes:
    """`depth` groups, one in the other."""
    return tag(field, GROUP) * depth + tag(field, END_GROUP) * depth


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def skip(data: bytes, at: int, wire_type: int) -> int:
    """The position behind a value; `data` is well-formed."""
    if wire_type == VARINT:
        return read_varint(data, at)[1]
    if wire_type == LEN:
        size, at = read_varint(data, at)
        return at + size
    if wire_type == GROUP:
        while True:
            key, at = read_varint(data, at)
            if key & 7 == END_GROUP:
                return at
            at = skip(data, at, key & 7)
    return at + (8 if wire_type == FIXED64 else 4)


def fields(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(tag, value without its length, the whole field) of each field of a well-formed message or group."""
    at = 0
    while at < len(data):
        start = at
        key, at = read_varint(data, at)
        if key & 7 == END_GROUP:
            return
        begin = read_varint(data, at)[1] if key & 7 == LEN else at
        at = skip(data, at, key & 7)
        yield key, data[begin:at], data[start:at]


# The messages inside a message, by field number.
Schema = dict[int, "Schema"]
ENTRY: Schema = {2: {}}
REQUEST: Schema = {4: ENTRY, 5: {4: ENTRY, 5: {}}, 6: {2: ENTRY}}


def clean_entries(data: bytes, schema: Schema = REQUEST) -> bytes:
    """A well-formed ModelInferRequest without the unknown fields of its map entries.

    The official implementations differ about an entry that holds an unknown field: C++ keeps it, as we do, upb drops
    the entry. What upb reads from the cleaned message is what C++ reads from the original.
    """
    out = []
    for key, value, whole in fields(data):
        inner = schema.get(key >> 3) if key & 7 == LEN else None
        if inner is None:
            out.append(whole)
        elif inner is ENTRY:
            out.append(run(key >> 3, *(f for k, _, f in fields(value) if k in (1 << 3 | LEN, 2 << 3 | LEN))))
        else:
            out.append(run(key >> 3, clean_entries(value, inner)))
    return b"".join(out)


def has_long_length(data: bytes, schema: Schema = REQUEST) -> bool:
    """Whether a length in a ModelInferRequest, well-formed otherwise, takes more than 5 bytes.

    C++ and protobuf 7 refuse that, as we do; upb of protobuf 6 takes up to 10.
    """
    for key, value, whole in fields(data):
        if key & 7 == GROUP and has_long_length(value, {}):
            return True
        if key & 7 == LEN:
            tag_size = read_varint(whole, 0)[1]
            inner = schema.get(key >> 3)
            if len(whole) - tag_size - len(value) > 5 or (inner is not None and has_long_length(value, inner)):
                return True
    return False
