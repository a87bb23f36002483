"""Large output is written to the socket as far as that takes it; the rest is there for the transport."""

from __future__ import annotations

import socket

import pytest

from tests.native.h2peer import Lanes, Peer, framed, output

KIB = 1 << 10
DATA = bytes(range(256)) * (3 * KIB)
WINDOW = 16 << 20


pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture
def lanes():
    lanes = Lanes()
    yield lanes
    lanes.close()


@pytest.fixture
def peer(lanes):
    peer = Peer(lanes.endpoint, window=WINDOW)
    peer.h2.increment_flow_control_window(WINDOW)
    yield peer
    peer.close()


@pytest.fixture
def sockets():
    """A socket that the server writes to, which does not block and holds little; and the client's end."""
    ends = socket.socketpair()
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * KIB)
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def answered(lanes, peer, *ids):
    """Calls whose answers wait in the connection."""
    streams = [peer.open() for _ in ids]
    for stream, name in zip(streams, ids, strict=True):
        peer.send_all(stream, framed(lanes.request(DATA, name)))
    lanes.settle()
    return streams


def drained(end):
    out = bytearray()
    while True:
        try:
            out += end.recv(1 << 20)
        except BlockingIOError:
            return bytes(out)


def test_what_the_socket_does_not_take_stays_in_order(lanes, peer, sockets):
    streams = answered(lanes, peer, "a", "b")
    ours, theirs = sockets
    assert peer.connection.collect_output(4 << 20) > 2 * len(DATA)
    assert not peer.connection.write(ours.fileno())
    peer.read(drained(theirs))
    assert not peer.answers[streams[1]].ended
    assert not peer.connection.write(ours.fileno())  # some more
    peer.read(drained(theirs))
    peer.read(b"".join(bytes(piece) for piece in peer.connection.take_ready()))
    assert [output(peer.answers[stream].messages[0]) for stream in streams] == [("a", DATA), ("b", DATA)]
    assert peer.connection.collect_output() == 0


def test_all_of_it_is_written_where_there_is_room(lanes, peer, sockets):
    (stream,) = answered(lanes, peer, "a")
    ours, theirs = sockets
    done = False
    while not done:
        assert peer.connection.collect_output() > 0
        done = peer.connection.write(ours.fileno())
        peer.read(drained(theirs))
    assert output(peer.answers[stream].messages[0]) == ("a", DATA)
    assert peer.connection.take_ready() == []


def test_a_socket_that_is_closed_leaves_it_all(lanes, peer, sockets):
    (stream,) = answered(lanes, peer, "a")
    ours, theirs = sockets
    theirs.close()
    size = peer.connection.collect_output()
    assert not peer.connection.write(ours.fileno())
    pieces = peer.connection.take_ready()
    assert sum(len(bytes(piece)) for piece in pieces) == size
    peer.read(b"".join(bytes(piece) for piece in pieces))
    peer.pump()
    assert output(peer.answers[stream].messages[0]) == ("a", DATA)
