"""Memory for answers that nobody reads: capped for all connections together, and readers are served meanwhile."""

from __future__ import annotations

import pytest

from tests.native.h2peer import Lanes, Peer, framed, output

MIB = 1 << 20
LIMIT = 4 * MIB


@pytest.fixture(autouse=True)
def _nothing_left(native_counters):
    """No stream, connection, request or block survives its test."""


@pytest.fixture
def lanes():
    lanes = Lanes(max_unsent=LIMIT)
    yield lanes
    lanes.close()


def call(lanes, peer, size=MIB):
    stream = peer.open()
    peer.send_all(stream, framed(lanes.request(bytes(size))))
    return stream


def answered(lanes, peer, size=MIB):
    """A call by a peer that reads."""
    stream = call(lanes, peer, size)
    for _ in range(20):
        lanes.settle()
        peer.pump()
    return peer.answers[stream].ended


def stalled_peers(lanes, count):
    peers = [Peer(lanes.endpoint, reading=False) for _ in range(count)]
    for peer in peers:
        peer.pump()
        call(lanes, peer)
    for _ in range(3):
        lanes.settle()
        for peer in peers:
            peer.pump()
    return peers


def test_unread_answers_are_capped_over_all_connections(lanes):
    reader = Peer(lanes.endpoint)
    assert answered(lanes, reader)
    stalled = stalled_peers(lanes, 20)
    assert LIMIT // 2 < lanes.endpoint.unsent <= LIMIT
    assert lanes.endpoint.waiting
    for _ in range(3):
        assert answered(lanes, reader)
    assert lanes.endpoint.unsent <= LIMIT
    for peer in (*stalled, reader):
        peer.close()
    lanes.settle()
    assert lanes.endpoint.unsent == 0
    assert not lanes.endpoint.waiting


def test_calls_that_wait_run_when_there_is_room(lanes):
    reader = Peer(lanes.endpoint)
    assert answered(lanes, reader)
    stalled = stalled_peers(lanes, 3)
    late = Peer(lanes.endpoint)
    stream = call(lanes, late)
    lanes.settle()
    late.pump()
    assert not late.answers[stream].ended
    stalled.pop().close()
    for _ in range(20):
        lanes.settle()
        late.pump()
    assert late.answers[stream].ended
    assert len(output(late.answers[stream].messages[0])[1]) == MIB
    for peer in (*stalled, reader, late):
        peer.close()


def test_a_waiting_call_may_be_reset(lanes):
    reader = Peer(lanes.endpoint)
    assert answered(lanes, reader)
    stalled = stalled_peers(lanes, 6)
    assert lanes.endpoint.waiting
    late = Peer(lanes.endpoint)
    stream = call(lanes, late)
    late.h2.reset_stream(stream)
    late.pump()
    assert late.connection.streams == 0
    for peer in (*stalled, reader, late):
        peer.close()
    lanes.settle()
    assert not lanes.endpoint.waiting


def test_small_answers_never_wait(lanes):
    peers = [Peer(lanes.endpoint, reading=False) for _ in range(100)]
    streams = [peer.open() for peer in peers]
    for peer, stream in zip(peers, streams, strict=True):
        peer.send_all(stream, framed(lanes.request(b"x" * 100)))
    lanes.settle()
    for peer, stream in zip(peers, streams, strict=True):
        peer.pump()
        assert peer.answers[stream].ended
        peer.close()
