"""Guards gRPC's header syntax (PROTOCOL-HTTP2.md): timeouts, percent-encoded messages, metadata with binary values."""

import base64
import string
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferd._native.transport.headers import _headers, _message, _pairs, _timeout

UNITS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
FOREVER = (1 << 63) - 1
LIMIT = 4096

keys = st.text(string.ascii_lowercase + string.digits + "_.-", min_size=1).filter(
    lambda key: not key.startswith("grpc-") and not key.endswith("-bin")
)
ascii_values = st.text([chr(c) for c in range(0x20, 0x7F)])


@given(st.text(string.digits, min_size=1, max_size=8), st.sampled_from(sorted(UNITS)))
@example("99999999", "H")
@example("0", "n")
def test_timeout_is_number_and_unit(digits, unit):
    assert _timeout((digits + unit).encode()) == min(int(digits) * UNITS[unit], FOREVER)


@pytest.mark.parametrize(
    "text", ["", "1", "S", "123456789n", "-1S", "+1S", " 1S", "1 S", "1s", "1h", "1.5S", "1SS", "1\0"]
)
def test_a_timeout_that_grpc_does_not_allow_is_not_read(text):
    assert _timeout(text.encode()) == -1


@given(st.binary(max_size=12))
def test_any_timeout_is_judged_by_its_grammar(text):
    good = 2 <= len(text) <= 9 and text[:-1].isdigit() and chr(text[-1]) in UNITS
    assert (_timeout(text) >= 0) == good


@given(st.text().map(lambda text: text.replace("\0", "")))
@example("100% 'größer' → 模型 🦀\r\n\x7f")
def test_message_is_percent_encoded(text):
    """What grpc's rules leave readable is readable; everything decodes to what it was."""
    encoded = _message(text.encode())
    assert all(0x20 <= c <= 0x7E for c in encoded)
    assert unquote_to_bytes(encoded) == text.encode()
    plain = sum(0x20 <= c <= 0x7E and c != ord("%") for c in text.encode())
    assert len(encoded) == plain + 3 * (len(text.encode()) - plain)


@given(st.binary(max_size=60).map(lambda text: text.replace(b"\0", b"")))
def test_bytes_that_are_no_text_are_encoded_too(text):
    assert unquote_to_bytes(_message(text)) == text


@settings(deadline=None)
@given(st.text([*"a%é模🦀"], min_size=LIMIT // 3, max_size=LIMIT + 10))
@example("a" * LIMIT)
@example("a" * (LIMIT + 1))
@example("🦀" * LIMIT)
def test_long_message_is_cut_between_characters(text):
    """Clients refuse large header lists: the limit counts the encoded bytes, and what is left is UTF-8."""
    encoded = _message(text.encode())
    kept = unquote_to_bytes(encoded).decode()
    assert text.startswith(kept)
    assert len(encoded) <= LIMIT
    if kept != text:
        assert len(encoded) + len(_message(text[len(kept)].encode())) > LIMIT


@given(keys, ascii_values)
def test_ascii_metadata_travels_as_it_is(key, value):
    [(name, wire)] = _headers([(key, value)])
    assert (name, wire) == (key.encode(), value.encode())
    assert _pairs(name, wire) == [(key, value)]
    assert _headers([(key, value.encode())]) == [(name, wire)]


@given(keys, st.binary())
def test_binary_metadata_travels_as_base64(key, value):
    [(name, wire)] = _headers([(key + "-bin", value)])
    assert b"=" not in wire
    assert _pairs(name, wire) == [(key + "-bin", value)]
    assert _pairs(name, base64.b64encode(value)) == [(key + "-bin", value)]


def test_binary_metadata_that_is_no_base64_is_given_as_it_came():
    assert _pairs(b"x-bin", b"A") == [("x-bin", b"A")]


def test_binary_values_joined_by_commas():
    """Intermediaries may join values so, says the gRPC protocol."""
    assert _pairs(b"x-bin", b"AQ,Ag==") == [("x-bin", b"\x01"), ("x-bin", b"\x02")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("", "v"),
        ("Upper", "v"),
        (":path", "v"),
        ("a b", "v"),
        ("ä", "v"),
        ("grpc-status", "0"),
        ("key", "ä"),
        ("key", "line\nbreak"),
        ("key", b"\xff"),
        ("key", "\0"),
    ],
)
def test_metadata_that_cannot_travel_is_refused(key, value):
    with pytest.raises(ValueError):
        _headers([(key, value)])


def test_status_details_may_be_set():
    """grpcio_status sends google.rpc.Status under this reserved key."""
    assert _headers([("grpc-status-details-bin", b"\1\2\3")]) == [(b"grpc-status-details-bin", b"AQID")]


def test_no_metadata_makes_no_headers():
    assert _headers(()) == []
    assert _headers(None) == []
