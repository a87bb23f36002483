"""Hypothesis strategies for encoded ModelInferRequests: well-formed, but in every form that the format allows.

Fields come in any order and may repeat, submessages may be split, tags, lengths and values may be longer than they
need be, unknown fields and known fields of another wire type lie in between.
"""

from hypothesis import strategies as st

from tests.native.official import DATATYPES
from tests.native.protowire import FIXED32, FIXED64, LEN, VARINT, group, tag, varint

USUAL_NAMES = ["", "INPUT0", "INPUT1", "a" * 16, "b" * 17, "naïve", "Übergrößenträger", "模型", "🦀🦀"]
names = st.sampled_from(USUAL_NAMES) | st.text(max_size=40)
integers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32 + 5, 2**40 + 7, 2**63 - 1, -(2**63), 2**64 - 1]),
)
dims = st.integers(-1, 20) | integers
values = st.builds(varint, integers, st.sampled_from([0, 0, 0, 2, 5, 10]))
prefixes = st.sampled_from([0, 0, 0, 2, 5])


@st.composite
def framed(draw, field: int, bodies) -> bytes:
    """A length-delimited field around a drawn body, its tag and length perhaps padded."""
    body = draw(bodies)
    return tag(field, LEN, draw(prefixes)) + varint(len(body), draw(prefixes)) + body


def scalar(field: int, wire_type: int, encoded):
    return st.builds(lambda size, body: tag(field, wire_type, size) + body, prefixes, encoded)


def text(field: int):
    return framed(field, names.map(str.encode))


def fixed(size: int):
    return st.binary(min_size=size, max_size=size)


def unknown(depth: int = 2):
    """A field that no message here knows: its number is too high, or its wire type is not the field's."""
    number = st.sampled_from([9, 15, 16, 100, 2**29 - 1])
    forms = [
        number.flatmap(lambda n: scalar(n, VARINT, values)),
        number.flatmap(lambda n: scalar(n, FIXED32, fixed(4))),
        number.flatmap(lambda n: scalar(n, FIXED64, fixed(8))),
        number.flatmap(lambda n: framed(n, st.binary(max_size=12))),
        st.integers(1, 8).flatmap(lambda n: scalar(n, FIXED32, fixed(4)) if n != 6 else scalar(n, VARINT, values)),
    ]
    if depth:
        anything = st.integers(1, 100)
        inner = st.lists(unknown(depth - 1), max_size=2).map(b"".join)
        forms.append(st.builds(lambda n, body: group(n, body), anything, inner))
    return st.one_of(forms)


def message(*known, most: int = 6):
    """Any of the known fields in any order, now and then an unknown one between them."""
    some = st.one_of(known)
    return st.lists(st.one_of(some, some, some, some, unknown()), max_size=most).map(b"".join)


def parameter_value():
    return message(
        scalar(1, VARINT, values),
        scalar(2, VARINT, values),
        text(3),
        scalar(4, FIXED64, fixed(8)),
        scalar(5, VARINT, values),
        most=2,
    )


def entry(field: int):
    """A map entry: key and value in any order, missing or repeated; few keys, so that they meet again."""
    key = framed(1, st.sampled_from([b"", b"a", b"priority", "größe".encode()]))
    return framed(field, message(key, key, framed(2, parameter_value()), most=3))


def elements(field: int):
    """Fields of InferTensorContents with one element, or packed with several."""
    if field == 8:
        return framed(8, st.binary(max_size=9))
    wire_type, encoded = {6: (FIXED32, fixed(4)), 7: (FIXED64, fixed(8))}.get(field, (VARINT, values))
    packed = framed(field, st.lists(encoded, max_size=20).map(b"".join))
    return scalar(field, wire_type, encoded) | packed


# elements in one field, as clients send them, or in any of the fields
any_contents = st.one_of(*[message(elements(n)) for n in range(1, 9)], message(*map(elements, range(1, 9))))


def tensor():
    return message(
        text(1),
        framed(2, st.sampled_from(list(DATATYPES)).map(str.encode)),
        scalar(3, VARINT, dims.map(varint)),
        framed(3, st.lists(dims.map(varint), max_size=5).map(b"".join)),
        entry(4),
        framed(5, any_contents),
        most=8,
    )


requests = message(
    text(1),
    text(2),
    text(3),
    entry(4),
    framed(5, tensor()),
    framed(5, tensor()),
    framed(6, message(text(1), entry(2), most=4)),
    framed(7, st.binary(max_size=80)),
    most=8,
)
