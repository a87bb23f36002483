"""The syntax of timeouts, percent-encoded messages and metadata in gRPC's headers."""

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport strlen

import binascii
import re

cdef enum:
    MESSAGE_LIMIT = 4096     # encoded: clients refuse header lists of more than 8 KiB
    TIMEOUT_DIGITS = 8

cdef int64_t FOREVER = 0x7fffffffffffffff

KEY = re.compile(r"[0-9a-z_.\-]+")
STATUS_DETAILS = "grpc-status-details-bin"  # the one reserved key that applications set, as grpcio_status does
ASCII_VALUE = re.compile(r"[\x20-\x7e]*")


cdef int64_t unit_ns(uint8_t unit) noexcept nogil:
    if unit == c"H":
        return 3600 * 1000000000
    if unit == c"M":
        return 60 * <int64_t>1000000000
    if unit == c"S":
        return 1000000000
    if unit == c"m":
        return 1000000
    if unit == c"u":
        return 1000
    if unit == c"n":
        return 1
    return 0


cdef int64_t timeout_parse(const uint8_t *text, size_t size) noexcept nogil:
    cdef int64_t value = 0
    cdef int64_t unit
    cdef size_t i
    if size < 2 or size > TIMEOUT_DIGITS + 1:
        return -1
    for i in range(size - 1):
        if not c"0" <= text[i] <= c"9":
            return -1
        value = value * 10 + (text[i] - c"0")
    unit = unit_ns(text[size - 1])
    if unit == 0:
        return -1
    return FOREVER if value > FOREVER // unit else value * unit


cdef char *message_encode(const char *text) noexcept nogil:
    cdef const char *digits = "0123456789ABCDEF"
    cdef size_t room = min(3 * strlen(text), <size_t>MESSAGE_LIMIT)
    cdef char *out = <char *>malloc(room + 1)
    cdef size_t at = 0
    cdef size_t whole = 0    # where the character that is being written began
    cdef bint plain
    cdef uint8_t c
    if out == NULL:
        return NULL
    while text[0]:
        c = <uint8_t>text[0]
        text += 1
        plain = 0x20 <= c <= 0x7e and c != c"%"
        if c & 0xc0 != 0x80:
            whole = at
        if at + (1 if plain else 3) > room:
            at = whole  # the cut text stays UTF-8
            break
        if plain:
            out[at] = <char>c
            at += 1
        else:
            out[at] = c"%"
            out[at + 1] = digits[c >> 4]
            out[at + 2] = digits[c & 15]
            at += 3
    out[at] = 0
    return out


cdef list metadata_pairs(const uint8_t *name, size_t name_size, const uint8_t *value, size_t value_size):
    cdef str key = (<const char *>name)[:name_size].decode("ascii", "replace")
    cdef bytes raw = (<const char *>value)[:value_size]
    if key.endswith("-bin"):
        return [(key, binary_value(part)) for part in raw.split(b",")]
    return [(key, raw.decode("ascii", "replace"))]


cdef bytes binary_value(bytes raw):
    # base64, with or without padding; a value that cannot be decoded is returned as it came
    try:
        return binascii.a2b_base64(raw + b"=" * (3 - (len(raw) + 3) % 4))
    except binascii.Error:
        return raw


cdef list metadata_headers(object metadata):
    # header pairs in bytes; ValueError for a pair that cannot be sent
    cdef list out = []
    for key, value in metadata or ():
        if not KEY.fullmatch(key) or (key.startswith("grpc-") and key != STATUS_DETAILS):
            raise ValueError(f"metadata key {key!r} must be of the characters 0-9 a-z _ . - and not start with 'grpc-'")
        if key.endswith("-bin"):
            value = value.encode() if isinstance(value, str) else bytes(value)
            value = binascii.b2a_base64(value, newline=False).rstrip(b"=")
        else:
            value = value.decode("ascii") if isinstance(value, bytes) else value
            if not ASCII_VALUE.fullmatch(value):
                raise ValueError(f"the value of metadata key {key!r} must be printable ASCII; binary values need a key "
                                 f"that ends with '-bin'")
            value = value.encode("ascii")
        out.append((key.encode("ascii"), value))
    return out


# For tests.

def _timeout(text: bytes) -> int:
    return timeout_parse(text, len(text))


def _message(text: bytes) -> bytes:
    cdef char *encoded = message_encode(text)
    if encoded == NULL:
        raise MemoryError
    try:
        return encoded
    finally:
        free(encoded)


def _pairs(name: bytes, value: bytes) -> list:
    return metadata_pairs(name, len(name), value, len(value))


def _headers(metadata) -> list:
    return metadata_headers(metadata)
