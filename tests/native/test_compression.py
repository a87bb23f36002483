"""Guards compressed messages: what zlib says, limits that hold while inflating, order, and nothing left behind."""

import gzip
import os
import random
import resource
import select
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd._native.memory.resource import live_counters, pooled, trim
from inferd._native.transport.call import EVENT_HALF_CLOSE, EVENT_MESSAGE
from inferd._native.transport.client import ClientUse
from inferd._native.transport.compression import DEFLATE, GZIP, _deflate, _inflate
from inferd._native.transport.connection import Connection
from inferd._native.transport.thread_pool import PoolThreads
from tests.native.h2peer import INFER, Echo, Lanes, Peer, framed, output

ECHO = "/test.Echo/Echo"
MIB = 1 << 20
INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED, OK = 13, 8, 12, 0

COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}
DECOMPRESS = {"gzip": gzip.decompress, "deflate": zlib.decompress}
ENCODINGS = {"gzip": GZIP, "deflate": DEFLATE}
each_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


def bomb(encoding, size=1 << 30):
    """About `size` / 1029 bytes that inflate to `size`."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    data = block * (size // MIB) + b"\3\0"
    if encoding == "gzip":
        return gzip.compress(b"")[:10] + data + struct.pack("<II", 0, size)  # the checksum is never reached
    return zlib.compress(b"", 9)[:2] + data + struct.pack(">HH", size % 65521, 1)


def text(size, seed=0):
    """Bytes that compress to about a quarter."""
    return np.frombuffer(b"abc ", np.uint8)[np.random.default_rng(seed).integers(0, 4, size)].tobytes()


def refusal(encoding, data, limit=64 * MIB):
    with pytest.raises(ValueError, match=r"corrupt|truncated|too large") as caught:
        _inflate(ENCODINGS[encoding], data, limit)
    return str(caught.value)


# ---- whole messages, against Python's zlib ----


shapes = st.one_of(
    st.binary(max_size=5000),
    st.integers(0, 3 * MIB).map(bytes),
    st.tuples(st.integers(0, 300_000), st.integers(0, 9)).map(lambda pair: text(*pair)),
    st.integers(0, 300_000).map(os.urandom),
)


@each_encoding
@given(shapes, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_inflate_is_the_inverse_of_zlib(encoding, data, level):
    packed = COMPRESS[encoding](data, level)
    assert _inflate(ENCODINGS[encoding], packed) == data
    assert _inflate(ENCODINGS[encoding], packed, max(1, len(data))) == data


@each_encoding
@given(shapes, st.integers(1, 9), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_zlib_is_the_inverse_of_deflate(encoding, data, level, cut):
    at = len(data) * cut // 100
    packed = _deflate(ENCODINGS[encoding], [data[:at], data[at:]], level)
    if packed is not None:
        assert DECOMPRESS[encoding](packed) == data
        assert len(packed) <= len(data) - len(data) // 16


@each_encoding
@pytest.mark.parametrize("size", [4096, 60_000, 600_000, 5 * MIB])
def test_what_shrinks_is_compressed(encoding, size):
    assert len(_deflate(ENCODINGS[encoding], [text(size)])) < size // 2


@each_encoding
@pytest.mark.parametrize("size", [0, 10, 4096, 60_000, 600_000])
def test_what_does_not_shrink_is_left_alone(encoding, size):
    assert _deflate(ENCODINGS[encoding], [os.urandom(size)]) is None


@each_encoding
@given(st.binary(max_size=20_000), st.data())
@settings(max_examples=100, deadline=None)
def test_every_cut_is_found(encoding, data, draw):
    packed = COMPRESS[encoding](data)
    cut = draw.draw(st.integers(0, len(packed) - 1))
    assert refusal(encoding, packed[:cut]) in ("truncated", "corrupt")


@each_encoding
@given(st.binary(min_size=1, max_size=2000), st.data())
@settings(max_examples=200, deadline=None)
def test_damage_is_found_or_harmless(encoding, data, draw):
    packed = bytearray(COMPRESS[encoding](data))
    packed[draw.draw(st.integers(0, len(packed) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        result = _inflate(ENCODINGS[encoding], bytes(packed), MIB)
    except ValueError:
        return
    assert result == data  # a byte of the gzip header that means nothing


@each_encoding
@given(st.binary(max_size=3000))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_not_compressed_are_refused_without_harm(encoding, data):
    try:
        _inflate(ENCODINGS[encoding], data, MIB)
    except ValueError as error:
        assert str(error) in ("truncated", "corrupt", "too large")  # some inputs are valid


@each_encoding
def test_bytes_behind_the_compressed_data_are_refused(encoding):
    assert refusal(encoding, COMPRESS[encoding](b"some data") + b"x") == "corrupt"
    assert refusal(encoding, COMPRESS[encoding](b"some data") * 2) == "corrupt"


@each_encoding
@pytest.mark.parametrize("size", [1000, 100_000, 3 * MIB])
def test_the_limit_is_exact(encoding, size):
    packed = COMPRESS[encoding](bytes(size))
    assert len(_inflate(ENCODINGS[encoding], packed, size)) == size
    assert refusal(encoding, packed, size - 1) == "too large"


def test_a_gzip_message_cannot_exceed_what_it_declares():
    packed = bytearray(gzip.compress(bytes(10_000)))
    packed[-4:] = struct.pack("<I", 9_999)
    assert refusal("gzip", bytes(packed)) == "corrupt"
    packed[-4:] = struct.pack("<I", 0xFFFF_FFFF)  # more than deflate can do
    assert refusal("gzip", bytes(packed)) == "corrupt"


@pytest.fixture(scope="module")
def bombs():
    return {encoding: bomb(encoding) for encoding in ENCODINGS}


@each_encoding
def test_a_bomb_needs_no_more_than_the_limit(encoding, bombs):
    limit = 8 * MIB
    trim()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        assert refusal(encoding, bombs[encoding], limit) == "too large"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 <= limit + MIB
    assert pooled() <= MIB


def test_a_gzip_bomb_is_refused_by_its_trailer():
    """The trailer is enough: the bytes before it are no deflate data at all."""
    nonsense = gzip.compress(b"")[:10] + b"\xff" * 1_000_000
    assert refusal("gzip", nonsense + struct.pack("<II", 0, 1 << 29), 64 * MIB) == "too large"
    assert refusal("gzip", nonsense + struct.pack("<II", 0, 1 << 25), 64 * MIB) == "corrupt"


# ---- on a connection ----


pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture
def pool_threads():
    pool_threads = PoolThreads(1)
    pool_threads.start()
    yield pool_threads
    pool_threads.close()


@pytest.fixture(params=["at once", "on the thread pool"])
def jobs(request):
    """The PoolThreads of an endpoint, or None."""
    return request.getfixturevalue("pool_threads") if request.param == "on the thread pool" else None


@pytest.fixture
def echo(jobs):
    return Echo(pool_threads=jobs, max_inflated=MIB)


@pytest.fixture
def peer(echo):
    peer = Peer(echo.endpoint)
    yield peer
    peer.close()


def settle(peer, endpoint, pool_threads, condition):
    """Exchange bytes and collect jobs until the condition holds."""
    end = time.monotonic() + 60
    peer.pump()
    while not condition():
        assert time.monotonic() < end, "nothing more happens"
        if pool_threads is not None and select.select([pool_threads.event_fd], [], [], 0.01)[0]:
            endpoint.collect_jobs()
        peer.pump()


def call(peer, echo, jobs, *parts, encoding="gzip", accept=None, end=True):
    metadata = (("grpc-encoding", encoding),) + ((("grpc-accept-encoding", accept),) if accept else ())
    stream = peer.open(ECHO, metadata)
    answer = peer.answers[stream]
    peer.send_all(stream, b"".join(parts), end=end)
    settle(peer, echo.endpoint, jobs, lambda: answer.ended or not end)
    return answer


def pieces(answer):
    """(compressed, bytes) of each message of an answer."""
    data, found = bytes(answer.data), []
    while data:
        compressed, size = struct.unpack_from(">BI", data)
        found.append((compressed, data[5 : 5 + size]))
        data = data[5 + size :]
    return found


@each_encoding
def test_messages_keep_their_order(peer, echo, jobs, encoding):
    """Small, large, and plain ones in between, each waiting for the one before it."""
    messages = [text(size, size) for size in (10, 300_000, 20, 0, 70_000, 5, 900_000, 1)]
    parts = [
        framed(message) if index % 3 == 2 else framed(COMPRESS[encoding](message), compressed=1)
        for index, message in enumerate(messages)
    ]
    answer = call(peer, echo, jobs, *parts, encoding=encoding)
    assert answer.messages == messages
    assert answer.status == OK
    assert [kind for _, kind in echo.events].index(EVENT_HALF_CLOSE) >= len(messages)


@given(st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=12), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_compressed_and_plain_messages_of_a_stream_stay_in_order(sizes, seed):
    pool_threads = PoolThreads(1)
    pool_threads.start()
    echo = Echo(pool_threads=pool_threads)
    peer = Peer(echo.endpoint)
    messages = [text(size, seed + index) for index, (size, _) in enumerate(sizes)]
    parts = [
        framed(zlib.compress(message, 1), compressed=1) if packed else framed(message)
        for message, (_, packed) in zip(messages, sizes, strict=True)
    ]
    try:
        stream = peer.open(ECHO, (("grpc-encoding", "deflate"),), end=not parts)
        if parts:
            peer.send_all(stream, b"".join(parts))
        settle(peer, echo.endpoint, pool_threads, lambda: peer.answers[stream].ended)
        assert peer.answers[stream].messages == messages
    finally:
        peer.close()
        pool_threads.close()


@pytest.mark.parametrize("size", [100, 200_000])
@each_encoding
def test_a_corrupt_message_ends_its_call_and_no_other(peer, echo, jobs, encoding, size):
    packed = COMPRESS[encoding](text(size))
    for wrong in (packed[:-1], packed + b"x", b"\1" + packed[1:], b""):
        answer = call(peer, echo, jobs, framed(wrong, compressed=1), encoding=encoding)
        # what is cut may end in four bytes that claim a larger size than allowed
        assert answer.status == INTERNAL or (answer.status, encoding) == (RESOURCE_EXHAUSTED, "gzip")
    assert call(peer, echo, jobs, framed(packed, compressed=1), encoding=encoding).messages == [text(size)]


@each_encoding
@pytest.mark.parametrize("size", [MIB + 1, 64 * MIB])
def test_too_large_after_decompression(peer, echo, jobs, encoding, size):
    packed = COMPRESS[encoding](bytes(size))
    answer = call(peer, echo, jobs, framed(b"ok"), framed(packed, compressed=1), encoding=encoding)
    assert answer.status == RESOURCE_EXHAUSTED
    assert answer.messages in ([b"ok"], [])  # an error may overtake what was sent before


@pytest.mark.parametrize(("encoding", "mark"), [("identity", 1), ("gzip", 2), ("gzip", 255)])
def test_a_mark_of_compression_that_cannot_be_is_refused(peer, echo, jobs, encoding, mark):
    assert call(peer, echo, jobs, framed(b"data", compressed=mark), encoding=encoding).status == INTERNAL


def test_messages_that_nobody_takes_are_not_inflated(pool_threads):
    """A hundred small messages of 1 MiB each: those beyond the bound of a stream stay as they are."""
    echo = Echo(pool_threads=pool_threads)
    echo.hold = True
    peer = Peer(echo.endpoint)
    packed = framed(zlib.compress(bytes(MIB)), compressed=1)
    stream = peer.open(ECHO, (("grpc-encoding", "deflate"),))
    peer.send_all(stream, packed * 100, end=True)
    settle(peer, echo.endpoint, pool_threads, lambda: (0, EVENT_MESSAGE) in echo.events)
    later = peer.open(ECHO, (("grpc-encoding", "deflate"),))  # behind whatever the one thread has to do
    peer.send_all(later, framed(zlib.compress(text(900_000)), compressed=1), end=False)
    settle(peer, echo.endpoint, pool_threads, lambda: (1, EVENT_MESSAGE) in echo.events)
    assert echo.events.count((0, EVENT_MESSAGE)) == 1
    for taken in range(100):
        settle(peer, echo.endpoint, pool_threads, lambda taken=taken: echo.events.count((0, EVENT_MESSAGE)) > taken)
        assert echo.calls[0].take_message() == bytes(MIB)
    settle(peer, echo.endpoint, pool_threads, lambda: (0, EVENT_HALF_CLOSE) in echo.events)
    peer.close()


@pytest.mark.parametrize("seed", range(5))
def test_streams_that_end_while_the_pool_has_their_messages(pool_threads, seed):
    draw = random.Random(seed)
    echo = Echo(pool_threads=pool_threads)
    peer = Peer(echo.endpoint, window=1 << 24)
    packed = framed(zlib.compress(text(300_000), 1), compressed=1)
    for _ in range(40):
        stream = peer.open(ECHO, (("grpc-encoding", "deflate"), ("grpc-accept-encoding", "gzip")))
        peer.send_all(stream, packed, end=draw.random() < 0.5)
        if draw.random() < 0.5 and select.select([pool_threads.event_fd], [], [], 0.02)[0]:
            echo.endpoint.collect_jobs()
        if not peer.answers[stream].ended:
            peer.h2.reset_stream(stream)
        peer.pump()
    peer.close()


@pytest.mark.parametrize("when", ["at once", "one is inflated", "one is collected", "all are collected"])
def test_a_connection_that_closes_while_the_pool_has_its_messages(pool_threads, when):
    echo = Echo(pool_threads=pool_threads)
    peer = Peer(echo.endpoint)
    for _ in range(8):
        stream = peer.open(ECHO, (("grpc-encoding", "gzip"),))
        peer.send_all(stream, framed(gzip.compress(text(300_000), 1), compressed=1), end=False)
    if when == "one is inflated":
        assert select.select([pool_threads.event_fd], [], [], 60)[0]
    collected = {"one is collected": 1, "all are collected": 8}.get(when, 0)
    settle(peer, echo.endpoint, pool_threads, lambda: len(echo.events) >= collected)
    peer.close()


# ---- answers of Python calls ----


class Compressing(Echo):
    """An echo that compresses its answers."""

    def __init__(self, encoding, **limits):
        super().__init__(**limits)
        self.encoding = encoding

    def _on_call(self, call):
        super()._on_call(call)
        call.set_compression(self.encoding)


@pytest.mark.parametrize(
    ("wanted", "accept", "got"),
    [
        ("", "identity, deflate, gzip", "gzip"),
        ("", "identity,deflate", "deflate"),
        ("", "zstd", None),
        ("", None, None),
        ("gzip", "gzip", "gzip"),
        ("deflate", "identity, deflate, gzip", "deflate"),
        ("deflate", "gzip", None),
        ("identity", "gzip", None),
    ],
)
def test_responses_are_compressed_as_both_sides_agree_where_it_pays(jobs, wanted, accept, got):
    echo = Compressing(wanted, pool_threads=jobs)
    peer = Peer(echo.endpoint, window=1 << 24)
    messages = [text(size, size) for size in (10, 2000, 300_000, 500, 9_000, 1_500_000, 3)] + [os.urandom(100_000), b""]
    answer = call(peer, echo, jobs, *map(framed, messages), encoding="identity", accept=accept)
    assert answer.status == OK
    assert answer.headers.get("grpc-encoding") == got
    found = pieces(answer)
    assert [DECOMPRESS[got](data) if compressed else data for compressed, data in found] == messages
    worth = [got is not None and len(message) > 1024 and len(set(message)) == 4 for message in messages]
    assert [compressed == 1 for compressed, _ in found] == worth
    peer.close()


def test_an_error_after_answers_that_wait(pool_threads):
    echo = Echo(pool_threads=pool_threads)
    echo.hold = True
    peer = Peer(echo.endpoint, window=1 << 24)
    stream = peer.open(ECHO, (("grpc-accept-encoding", "gzip"),))
    peer.pump()
    handled = echo.calls[0]
    handled.set_compression("gzip")
    handled.send_message(text(500_000))
    assert not handled.writable
    handled.send_message(b"plain", compress=False)
    handled.end(5, "not there")
    answer = peer.answers[stream]
    settle(peer, echo.endpoint, pool_threads, lambda: answer.ended)
    assert [(compressed, len(data)) for compressed, data in pieces(answer)][1] == (0, 5)
    assert gzip.decompress(pieces(answer)[0][1]) == text(500_000)
    assert (answer.status, answer.trailers["grpc-message"]) == (5, "not there")
    peer.close()


def test_compression_is_chosen_before_the_headers(peer, echo, jobs):
    echo.hold = True
    call(peer, echo, jobs, framed(b""), end=False)
    with pytest.raises(ValueError, match="zstd"):
        echo.calls[0].set_compression("zstd")
    echo.calls[0].send_headers()
    with pytest.raises(ValueError, match="has been sent"):
        echo.calls[0].set_compression("gzip")


# ---- native ModelInfer ----


@pytest.fixture
def lanes(jobs):
    lanes = Lanes(pool_threads=jobs, max_inflated=4 * MIB, native_level=6)
    yield lanes
    lanes.close()


def infer(lanes, jobs, data, *, encoding="gzip", accept="gzip", times=1, change=lambda packed: packed):
    peer = Peer(lanes.endpoint, window=1 << 24)
    stream = peer.open(INFER, (("grpc-encoding", encoding), ("grpc-accept-encoding", accept)))
    packed = COMPRESS[encoding](lanes.request(data))
    peer.send_all(stream, framed(change(packed), compressed=1) * times)
    answer = peer.answers[stream]
    end = time.monotonic() + 60
    while not answer.ended:
        assert time.monotonic() < end
        if jobs is not None and select.select([jobs.event_fd], [], [], 0.001)[0]:
            lanes.endpoint.collect_jobs()
        lanes.settle()
        peer.pump()
    peer.close()
    return answer


@each_encoding
@pytest.mark.parametrize("size", [1, 3000, 60_000, 600_000])
def test_native_calls_take_and_give_compressed_messages(lanes, jobs, encoding, size):
    data = text(size)
    answer = infer(lanes, jobs, data, encoding=encoding, accept=encoding)
    ((compressed, message),) = pieces(answer)
    assert answer.headers.get("grpc-encoding") == (encoding if size > 1000 else None)
    assert output(DECOMPRESS[encoding](message) if compressed else message) == ("", data)
    assert bool(compressed) == (size > 1000)


def test_native_answers_that_do_not_shrink(lanes, jobs):
    data = os.urandom(200_000)
    answer = infer(lanes, jobs, data)
    assert "grpc-encoding" not in answer.headers
    assert output(answer.messages[0]) == ("", data)


def test_native_calls_that_cannot_be_inflated(lanes, jobs):
    for size in (100, 600_000):
        assert infer(lanes, jobs, text(size), change=lambda packed: packed[:-20]).status != OK
        assert infer(lanes, jobs, text(size), change=lambda packed: packed + b"x").status == INTERNAL
    assert infer(lanes, jobs, bytes(5 * MIB)).status == RESOURCE_EXHAUSTED


def test_a_second_message_of_a_native_call(lanes, jobs):
    assert infer(lanes, jobs, text(300_000), times=2).status == UNIMPLEMENTED


BESIDE = 768  # bytes of memory that a message takes beside its own


@pytest.mark.parametrize("end", ["reset", "hang up"])
def test_messages_of_calls_that_are_over_are_not_kept_for_the_pool(end, native_counters):
    """No thread of the pool has begun with them: they go with their calls, and their charge goes with them."""
    pool_threads = PoolThreads(1)  # that does not work yet
    echo = Echo(pool_threads=pool_threads)
    peer = Peer(echo.endpoint, window=1 << 24)
    packed = framed(gzip.compress(random.Random(1).randbytes(100_000)), compressed=1)
    before = live_counters()["blocks"]
    streams = []
    for _ in range(20):
        streams.append(peer.open(ECHO, (("grpc-encoding", "gzip"),)))
        peer.send_all(streams[-1], packed, end=False)
    assert echo.endpoint.ledger["inflating"] >= 20 * 100_000
    assert live_counters()["blocks"] >= before + 20
    if end == "reset":
        for stream in streams:
            peer.h2.reset_stream(stream)
        peer.pump()
    else:
        peer.close()
    assert (echo.endpoint.held, echo.endpoint.departed) == (0, 0)
    assert live_counters()["blocks"] <= before + 2, "of the connection's output"
    peer.close()
    pool_threads.close()


def test_what_a_thread_has_begun_with_is_charged_until_it_is_given_back(native_counters):
    """The call may be over: then only the server holds the memory."""
    pool_threads = PoolThreads(1)
    pool_threads.start()
    echo = Echo(pool_threads=pool_threads)
    use = ClientUse("client")
    peer = Peer(echo.endpoint, window=1 << 24)
    peer.connection.close()
    peer.connection = Connection(echo.endpoint, "test", use=use)
    peer.connection.flush = lambda: None
    packed = framed(gzip.compress(bytes(64 << 20), 1), compressed=1)
    stream = peer.open(ECHO, (("grpc-encoding", "gzip"),))
    peer.send_all(stream, packed, end=False)
    peer.h2.reset_stream(stream)
    peer.pump()
    assert use.bytes_held == 0
    assert echo.endpoint.held == echo.endpoint.departed
    assert echo.endpoint.held in (0, len(packed) - 5 + BESIDE)
    assert echo.endpoint.ledger_agrees()
    peer.close()
    settle(peer, echo.endpoint, pool_threads, lambda: echo.endpoint.held == 0)
    pool_threads.close()
    assert echo.endpoint.ledger_agrees()
