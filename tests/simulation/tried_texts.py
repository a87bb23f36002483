"""Trials of what the native code writes and reads as text or compressed: headers, errors, keyed hashes, messages.

Each is found out here a second time: by the rules of gRPC, by protobuf, by zlib, or by the published algorithm.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from random import Random
from urllib.parse import unquote_to_bytes

from inferd._native.protobuf.listing import encode_index
from inferd._native.refusal import count_refusal, refusal_counts, refusal_table
from inferd._native.siphash import siphash_of
from inferd._native.transport.compression import DEFLATE, GZIP, _deflate, _inflate
from inferd._native.transport.errorinfo import rich_status
from inferd._native.transport.headers import _headers, _message, _pairs, _timeout
from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.simulation.wire import Violation

TEXTS = ("", "x", "größe", "語", "\U0001f600", "100%", " a b ", "\r\n\t", "~\x7f", "n" * 130)
WORD = (1 << 64) - 1
UNITS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
FOREVER = (1 << 63) - 1
LONGEST_MESSAGE = 4096  # encoded
LONGEST_TEXT = 1024  # of an error that is sent twice
RETRY_SECONDS = 0.1
KEY = re.compile(r"[0-9a-z_.\-]+")
DETAILS = "grpc-status-details-bin"


def expect(found: object, expected: object, what: str) -> None:
    """Check that both are the same.

    Raises:
        Violation: they are not.
    """
    if found != expected:
        raise Violation(f"{what}: {found!r}, where {expected!r} was expected")


def result_of(do, *arguments):  # type: ignore[no-untyped-def]
    """What it returns, or the class of the ValueError that it raises."""
    try:
        return do(*arguments)
    except ValueError:
        return ValueError


# -- keyed hashes


def try_hashes(random: Random) -> None:
    """SipHash-2-4 as it is published."""
    for _ in range(4):
        key, data = random.randbytes(16), random.randbytes(random.randrange(40))
        expect(siphash_of(key, data), siphash(key, data), f"the hash of {data.hex()} with {key.hex()}")


def siphash(key: bytes, data: bytes) -> int:
    """SipHash-2-4 of `data`."""
    first, second = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    state = [0x736F6D6570736575 ^ first, 0x646F72616E646F6D ^ second, 0x6C7967656E657261 ^ first]
    state.append(0x7465646279746573 ^ second)
    whole = len(data) // 8 * 8
    last = data[whole:].ljust(7, b"\0") + bytes([len(data) & 255])
    for block in (*(data[at : at + 8] for at in range(0, whole, 8)), last):
        word = int.from_bytes(block, "little")
        state[3] ^= word
        _rounds(state, 2)
        state[0] ^= word
    state[2] ^= 0xFF
    _rounds(state, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _rounds(v: list[int], count: int) -> None:
    for _ in range(count):
        for a, b, turn, c, d, other in ((0, 1, 13, 2, 3, 16), (2, 1, 17, 0, 3, 21)):
            v[a] = v[a] + v[b] & WORD
            v[b] = _turned(v[b], turn) ^ v[a]
            v[c] = v[c] + v[d] & WORD
            v[d] = _turned(v[d], other) ^ v[c]
            if a == 0:
                v[0] = _turned(v[0], 32)
            else:
                v[2] = _turned(v[2], 32)


def _turned(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & WORD


# -- headers


def try_headers(random: Random) -> None:
    """Timeouts, texts of errors and metadata, as gRPC's rules have them."""
    for _ in range(6):
        text = "".join(random.choices("0123456789", k=random.choice((0, 1, 2, 8, 8, 9)))) + random.choice("HMSmunxh ")
        if random.random() < 0.2:
            text = text[: random.randrange(len(text))] + random.choice("/:-+ .\0") + text[1:]
        good = re.fullmatch(r"([0-9]{1,8})([HMSmun])", text)
        expected = min(int(good[1]) * UNITS[good[2]], FOREVER) if good else -1
        expect(_timeout(text.encode()), expected, f"the timeout {text!r}")
        _try_message("".join(random.choices(TEXTS, k=random.randrange(5))) * random.choice((1, 1, 1, 1, 12, 40)))
        _try_metadata(random)


def _try_message(text: str) -> None:
    encoded = _message(text.encode())
    kept = unquote_to_bytes(encoded).decode()
    parts, size = [], 0
    for letter in text:
        part = "".join(_encoded(byte) for byte in letter.encode())
        size += len(part)
        if size > LONGEST_MESSAGE:
            break
        parts.append(part)
    expect(encoded.decode(), "".join(parts), f"the text {text[:40]!r} of {len(text)} letters")
    expect(kept, text[: len(parts)], f"what is read of {text[:40]!r}")


def _encoded(byte: int) -> str:
    return chr(byte) if 0x20 <= byte <= 0x7E and byte != ord("%") else f"%{byte:02X}"


def _try_metadata(random: Random) -> None:
    pairs: list[tuple[str, object]] = []
    for _ in range(random.randrange(3)):
        key = random.choice(("x-key", "x_1.", "trace-bin", "x-bin", "Upper", "a b", "", "grpc-status", DETAILS))
        value: object = random.choice(("", "plain ~", "größe", "a\nb", b"bytes", b"\xff\0", random.randbytes(5)))
        pairs.append((key, value))
    expected = _wire_of(pairs)
    found = result_of(_headers, pairs)
    expect(found, expected, f"metadata {pairs}")
    if expected is ValueError:
        return
    for name, wire in found:
        again = _pairs(name, wire)
        bare = [value for key, value in pairs if key.encode() == name]
        wanted = [value.encode() if isinstance(value, str) else value for value in bare]
        read = [value if isinstance(value, bytes) else value.encode() for _, value in again]
        if len(again) != 1 or read[0] not in wanted or again[0][0] != name.decode():
            raise Violation(f"the header {name!r}: {wire!r} is read as {again}, where {bare} was written")
    _try_binary(random)


def _wire_of(pairs: list[tuple[str, object]]) -> object:
    out = []
    for key, value in pairs:
        if not KEY.fullmatch(key) or (key.startswith("grpc-") and key != DETAILS):
            return ValueError
        data = value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]
        if key.endswith("-bin"):
            out.append((key.encode(), base64.b64encode(data).rstrip(b"=")))
        elif not all(0x20 <= byte <= 0x7E for byte in data):
            return ValueError
        else:
            out.append((key.encode(), data))
    return out


def _try_binary(random: Random) -> None:
    """Values that came joined by commas, with padding or without, or that are no base64."""
    values = [random.randbytes(random.randrange(5)) for _ in range(random.randrange(1, 4))]
    parts = [base64.b64encode(value) for value in values]
    parts = [part if random.random() < 0.5 else part.rstrip(b"=") for part in parts]
    if random.random() < 0.2:
        parts.append(b"A")
        values.append(b"A")  # as it came
    expected = [("x-bin", value) for value in values]
    expect(_pairs(b"x-bin", b",".join(parts)), expected, f"the values {parts}")
    assert binascii.a2b_base64(b"AQ==") == b"\1"


# -- errors


def try_errors(random: Random) -> None:
    """The details of errors, as protobuf reads them; and each refusal is counted under its name."""
    table = refusal_table()
    before = refusal_counts()
    counted: dict[str, int] = {}
    for _ in range(6):
        status, refusal = random.randint(1, 16), random.randint(0, len(table))
        text = "".join(random.choices(TEXTS, k=random.randrange(4))) * random.choice((1, 1, 30, 200))
        if random.random() < 0.2:
            text = random.choice("xä") * (LONGEST_TEXT // random.choice((1, 2)) + random.choice((-1, 0, 1)))
        encoded = rich_status(status, text, refusal)
        if len(text.encode()) > LONGEST_TEXT:
            expect(encoded, b"", f"the details of a text of {len(text.encode())} bytes")
            continue
        usual = next((row for row in table if row[1] == status and row[0] in USUAL), None)
        name, _, retries, _ = table[refusal - 1] if refusal else usual or ("INTERNAL", 13, False, "")
        rich = richerrors.read(encoded)
        expected = richerrors.Rich(status, text, name, "inferd", RETRY_SECONDS if retries else None)
        expect(rich, expected, f"the details of status {status} with refusal {refusal}")
        count_refusal(status, refusal)
        counted[name] = counted.get(name, 0) + 1
    now = refusal_counts()
    expect({name: now[name] - before.get(name, 0) for name in counted}, counted, "refusals that were counted")
    for name, status, retries, text in table:
        if not (name.isupper() and 1 <= status <= 16 and text) or (retries and status not in (8, 14)):
            raise Violation(f"refusal {name} has status {status}, may be tried again: {retries}, and means {text!r}")


# The reason of a status for which nobody has named another one, as docs/errors.md says.
USUAL = frozenset(
    (
        "INVALID_REQUEST",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "NOT_ALLOWED",
        "LIMIT_EXCEEDED",
        "NOT_SERVED",
        "INTERNAL",
        "NOT_READY",
        "UNKNOWN_CALLER",
    )
)


# -- the index of a repository


def try_index(random: Random) -> None:
    """Protobuf reads the index that the server writes, also of names that are no text."""
    entries, expected = [], pb.RepositoryIndexResponse()
    for _ in range(random.choice((0, 1, 3, 40))):
        texts = [random.choice((*TEXTS, "\ud800", "a\udcff b")) for _ in range(4)]
        entries.append((*texts, "beside")[: random.choice((4, 5))])
        names = ("name", "version", "state", "reason")
        told = [text.encode("utf-8", "backslashreplace").decode() for text in texts]
        expected.models.add(**dict(zip(names, told, strict=True)))
    encoded = encode_index(entries)
    if pb.RepositoryIndexResponse.FromString(encoded) != expected or len(encoded) != expected.ByteSize():
        raise Violation(f"{entries} is written as {encoded.hex()}")
    for wrong in ([1], [("a", "b", "c")]):
        expect(result_of(encode_index, wrong), ValueError, f"the index of {wrong}")


# -- compressed messages

NO_MEMORY = "no memory"
GZIP_FRAME = 18
MOST_RATIO = 1032
PROBED = 64 << 10  # bytes from which a sample says whether a message is compressed
SAMPLE = 8 << 10
LONG = 2000  # bytes
SIZES = (0, 1, 100, 1024, 1025, 5000, 40_000, 64 << 10, 70_000, 300_000)


def _data(random: Random, size: int) -> bytes:
    """Bytes, some of which can be compressed."""
    part = random.choice((0, 1, 16, 100, 1 << 30))
    out = bytearray()
    while len(out) < size:
        out += random.randbytes(min(part or 1, size)) + bytes(random.choice((0, 1, 300, 5000)) if part else size)
    return bytes(out[:size])


def try_inflating(random: Random) -> None:
    """What was compressed comes back, within its limit; what is damaged is refused, and said to be so."""
    size = 1_300_000 if random.random() < 0.05 else random.choice(SIZES)
    data = _data(random, size)
    encoding = random.choice((GZIP, DEFLATE))
    wbits = random.randint(9, 15) + (16 if encoding == GZIP else 0)
    packing = zlib.compressobj(random.choice((0, 1, 6)), zlib.DEFLATED, wbits)
    packed = packing.compress(data) + packing.flush()
    limit = random.choice((size, size, max(0, size - 1), size + 1, 2 * size + 5000, 1 << 31))
    for _ in range(3):
        _inflate_as_zlib(encoding, packed, limit)
        damage = random.random()
        if damage < 0.3:
            packed = packed[: random.randrange(len(packed))]
        elif damage < 0.5:
            packed += random.choice((b"\0", b"more"))
        elif damage < 0.9:
            at = random.randrange(len(packed))
            packed = packed[:at] + bytes([packed[at] ^ 1 << random.randrange(8)]) + packed[at + 1 :]
        if not packed:
            return


def _inflate_as_zlib(encoding: int, packed: bytes, limit: int) -> None:
    try:
        found, said = _inflate(encoding, packed, limit), ""
    except ValueError as error:
        found, said = b"", str(error)
    if said == NO_MEMORY:
        raise MemoryError
    unpacking = zlib.decompressobj(31 if encoding == GZIP else 15)
    reason, data, is_full = "", b"", False
    try:
        data = unpacking.decompress(packed, min(limit, 4_000_000) + 1)
    except zlib.error:
        reason, is_full = "corrupt", _comes_to(encoding, packed, limit)
    else:
        if unpacking.eof and unpacking.unused_data:
            reason = "corrupt"
        elif len(data) > limit:
            reason = "too large"
        elif not unpacking.eof:
            reason = "truncated"
    if encoding == GZIP:  # which says at its end how large it is
        declared = int.from_bytes(packed[-4:], "little") if len(packed) >= GZIP_FRAME else 0
        if len(packed) < GZIP_FRAME:
            reason = "truncated"
        elif declared // MOST_RATIO > len(packed):
            reason = "corrupt"
        elif declared > limit:
            reason = "too large"
        elif reason and said in ("corrupt", "truncated"):
            reason = said  # what its end says is not true either
    elif reason and said == "too large" and (is_full or len(data) >= limit):
        reason = said  # the room was full before the end was seen
    expect((said, found), (reason, b"" if reason else data), f"{len(packed)} bytes that inflate to {len(data)}")


def _comes_to(encoding: int, packed: bytes, limit: int) -> bool:
    """Whether so much comes out before the damage; of what is long it may be so."""
    unpacking, size = zlib.decompressobj(31 if encoding == GZIP else 15), 0
    try:
        for byte in packed if len(packed) < LONG else b"":
            size += len(unpacking.decompress(bytes([byte])))
    except zlib.error:
        pass
    return size >= limit or len(packed) >= LONG


def try_deflating(random: Random) -> None:
    """A message is compressed as zlib does it, if that makes it worthwhile smaller."""
    size = 1_200_000 if random.random() < 0.05 else random.choice(SIZES)
    data, pieces = _data(random, size), []
    cuts = sorted(random.randint(0, size) for _ in range(random.choice((0, 0, 1, 3))))
    for begin, end in zip([0, *cuts], [*cuts, size], strict=True):
        pieces.append(data[begin:end])
    encoding, level = random.choice((GZIP, DEFLATE)), random.choice((1, 6, 9))
    found = _deflate(encoding, pieces, level)
    expected = None
    if size and (size < PROBED or _sample_shrinks(pieces)):
        packed = _packed(data, level, size, 16 if encoding == GZIP else 0)
        expected = packed if len(packed) <= size - size // 16 else None
    if found is None and expected is None:
        return
    if found is None or expected is None or found != expected:
        sizes = f"{found and len(found)}, where zlib makes {expected and len(expected)}"
        raise Violation(f"{size} bytes in {len(pieces)} parts become {sizes}")


def _sample_shrinks(pieces: list[bytes]) -> bool:
    largest = max(pieces, key=len)
    size = min(SAMPLE, len(largest))
    begin = (len(largest) - size) // 2
    return len(_packed(largest[begin : begin + size], 1, size, 0)) <= size - size // 16


def _packed(data: bytes, level: int, size: int, more: int) -> bytes:
    bits = next((bits for bits in range(9, 15) if 1 << bits >= size), 15)
    packing = zlib.compressobj(level, zlib.DEFLATED, bits + more, bits - 7)
    return packing.compress(data) + packing.flush()
