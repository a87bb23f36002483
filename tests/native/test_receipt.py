"""Direct receipt: a large message goes from the socket into the memory that its model shares with its workers."""

from __future__ import annotations

import gzip
import mmap

import pytest

from _native.memory.arena import ArenaHandle
from server.pb import grpc_service_pb2 as pb
from tests.native.h2peer import INFER, Lanes, Peer, framed, output

KIB = 1 << 10
NOT_FOUND = 5
LARGE = 40 * KIB
DATA = bytes(range(256)) * (LARGE // 256)


@pytest.fixture(autouse=True)
def _nothing_left(native_counters):
    """No stream, connection, request or block survives its test."""


class ArenaLanes(Lanes):
    """The model has an arena."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArenaHandle("test")
        self.lane.receive_into(self.arena)


@pytest.fixture
def lanes():
    lanes = ArenaLanes()
    yield lanes
    lanes.close()
    del lanes.arena  # pytest keeps the fixture's value


@pytest.fixture
def peer(lanes):
    peer = Peer(lanes.endpoint)
    yield peer
    peer.close()


def finish(lanes, peer, stream):
    lanes.settle()
    peer.pump()
    answer = peer.answers[stream]
    assert answer.status == 0
    return output(answer.messages[0])


def begin(peer, message, *parts):
    """A call whose message is sent in pieces that end there; the rest of it."""
    stream = peer.open()
    at = 0
    for end in parts:
        peer.send(stream, message[at:end])
        peer.pump()
        at = end
    return stream, message[at:]


def test_a_large_message_arrives_in_the_arena_of_its_model(lanes, peer):
    message = framed(lanes.request(DATA, "7"))
    stream, rest = begin(peer, message, 20 * KIB)
    assert lanes.arena.used >= len(message) - 5
    with mmap.mmap(lanes.arena.fd, 1 << 20, access=mmap.ACCESS_READ) as seen:
        assert seen.find(message[5 : 20 * KIB]) >= 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("7", DATA)
    assert lanes.arena.used == 0


def test_a_small_message_does_not(lanes, peer):
    stream, rest = begin(peer, framed(lanes.request(bytes(10 * KIB))), 5 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("", bytes(10 * KIB))


@pytest.mark.parametrize("first", [5, 6, 7])
def test_a_message_whose_first_piece_does_not_name_the_model_is_served_from_ordinary_memory(lanes, peer, first):
    message = framed(lanes.request(DATA))
    stream, rest = begin(peer, message, first, 20 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("", DATA)


def test_the_name_behind_other_fields_is_not_looked_for(lanes, peer):
    request = pb.ModelInferRequest.FromString(lanes.request(DATA))
    request.ClearField("model_name")
    stream, rest = begin(peer, framed(request.SerializeToString() + b"\x0a\x01m"), 20 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    assert finish(lanes, peer, stream) == ("", DATA)


def test_a_message_for_a_model_that_nobody_has_takes_nothing(lanes, peer):
    request = pb.ModelInferRequest.FromString(lanes.request(DATA))
    request.model_name = "other"
    stream, rest = begin(peer, framed(request.SerializeToString()), 20 * KIB)
    assert lanes.arena.used == 0
    peer.send_all(stream, rest)
    lanes.settle()
    peer.pump()
    assert peer.answers[stream].status == NOT_FOUND


def test_a_compressed_message_is_inflated_into_ordinary_memory(lanes, peer):
    packed = gzip.compress(lanes.request(DATA), compresslevel=0)
    stream = peer.open(INFER, metadata=(("grpc-encoding", "gzip"),))
    peer.send_all(stream, b"\x01" + len(packed).to_bytes(4, "big") + packed)
    assert lanes.arena.used == 0
    assert finish(lanes, peer, stream) == ("", DATA)


def test_what_a_client_has_sent_before_it_left_is_given_back(lanes, peer):
    begin(peer, framed(lanes.request(DATA)), 20 * KIB)
    assert lanes.arena.used
    peer.close()
    assert lanes.arena.used == 0


def test_what_was_sent_of_a_call_that_is_reset_is_given_back(lanes, peer):
    stream, _ = begin(peer, framed(lanes.request(DATA)), 20 * KIB)
    assert lanes.arena.used
    peer.h2.reset_stream(stream)
    peer.pump()
    assert lanes.arena.used == 0
