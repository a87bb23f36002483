"""Memory that clients make the server hold: bounded for all connections together, at the cost of who holds most and
moves least, and of nobody else."""

from __future__ import annotations

import pytest

from tests.native.h2peer import Clock, Echo, Peer, framed, output

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 4 * MIB
ENHANCE_YOUR_CALM = 11
RESOURCE_EXHAUSTED = 8


pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture
def lanes(made_lanes):
    return made_lanes(max_held_bytes=LIMIT)


def advance(endpoint, seconds):
    for _ in range(seconds):
        endpoint.clock.now += 1
        endpoint.expire()


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
        lanes.settle()
        peer.pump()
        advance(lanes.endpoint, 1)
    lanes.settle()
    for peer in peers:
        peer.pump()
    return peers


def test_unread_answers_are_bounded_over_all_connections(lanes):
    stalled = stalled_peers(lanes, 20)
    assert LIMIT // 2 < lanes.endpoint.ledger["unsent"] <= LIMIT
    assert lanes.endpoint.ledger_agrees()
    cut = [answer for peer in stalled for answer in peer.answers.values() if answer.reset == ENHANCE_YOUR_CALM]
    assert len(cut) >= 16, "who holds most goes, by a reset that clients see as RESOURCE_EXHAUSTED"
    for peer in stalled:
        peer.close()
    lanes.settle()
    assert lanes.endpoint.held == 0


def test_a_byte_now_and_then_is_not_reading(lanes):
    """Peers that take their answers byte by byte owe as much as those that take nothing."""
    slow = [Peer(lanes.endpoint, reading=False, window=1 * KIB) for _ in range(4)]
    for peer in slow:
        peer.pump()
        call(lanes, peer, 900 * KIB)
    lanes.settle()
    for _ in range(10):
        for peer in slow:
            for stream in peer.answers:
                if not peer.answers[stream].ended:
                    peer.h2.increment_flow_control_window(1, stream)
            peer.pump()
        advance(lanes.endpoint, 1)
    late = Peer(lanes.endpoint)
    assert answered(lanes, late, MIB)
    assert lanes.endpoint.held <= LIMIT
    for peer in (*slow, late):
        peer.close()


def test_one_large_answer_slows_nobody(made_lanes):
    """What one call has answered says nothing of what others will."""
    lanes = made_lanes(max_held_bytes=8 * MIB, running=False)
    lanes.run()
    first = Peer(lanes.endpoint, window=1 << 24)
    assert answered(lanes, first, 4 * MIB)
    peers = [Peer(lanes.endpoint) for _ in range(4)]
    streams = {peer: [call(lanes, peer, 64) for _ in range(50)] for peer in peers}
    assert lanes.lane.in_flight == 200, "every call runs as soon as it is complete"
    lanes.settle()
    for peer, its in streams.items():
        peer.pump()
        assert all(peer.answers[stream].ended for stream in its)
        peer.close()
    first.close()


def test_an_answer_must_be_taken_in_time(made_lanes):
    lanes = made_lanes(send_timeout=30.0)
    peer = Peer(lanes.endpoint, reading=False)
    peer.pump()
    stream = call(lanes, peer, MIB)
    lanes.settle()
    peer.pump()
    advance(lanes.endpoint, 29)
    peer.pump()
    assert peer.answers[stream].reset is None
    advance(lanes.endpoint, 8)  # 64 KiB have gone, which are 4 s
    peer.pump()
    assert peer.answers[stream].reset == ENHANCE_YOUR_CALM
    assert lanes.endpoint.held == 0
    peer.close()


def test_the_time_for_an_answer_begins_when_it_is_there(made_lanes):
    """However long it took to compute, and however long nothing else has happened."""
    lanes = made_lanes(send_timeout=30.0, running=False)
    peer = Peer(lanes.endpoint, reading=False, window=0)
    peer.pump()
    stream = call(lanes, peer, KIB)
    lanes.endpoint.clock.now += 100
    lanes.run()
    lanes.settle()
    peer.pump()
    advance(lanes.endpoint, 29)
    peer.pump()
    assert peer.answers[stream].reset is None
    advance(lanes.endpoint, 2)
    peer.pump()
    assert peer.answers[stream].reset == ENHANCE_YOUR_CALM
    peer.close()


def test_a_stream_whose_responses_are_not_taken_ends_and_its_owner_is_told(native_counters):
    echo = Echo(send_timeout=30.0)
    echo.endpoint.clock = Clock()
    peer = Peer(echo.endpoint, reading=False)
    stream = peer.open("/test/Stream")
    peer.pump()  # with the server's settings a whole message fits its window
    for _ in range(3):
        peer.send(stream, framed(bytes(64 * KIB)))
        peer.pump()
    assert not echo.calls[0].writable
    advance(echo.endpoint, 40)
    assert (0, "closed") in echo.events
    assert not echo.calls[0].open
    peer.pump()
    assert peer.answers[stream].reset == ENHANCE_YOUR_CALM
    assert echo.endpoint.held == 0
    peer.close()


def test_a_response_that_waits_behind_one_that_was_taken_has_its_time_too(native_counters):
    """Both are there before either is framed: the first leaves whole, the second meets the end of the window."""
    echo = Echo(send_timeout=30.0)
    echo.endpoint.clock = Clock()
    echo.hold = True
    peer = Peer(echo.endpoint, reading=False)
    stream = peer.open("/test/Stream")
    peer.pump()
    echo.calls[0].send_message(bytes(KIB))
    echo.calls[0].send_message(bytes(128 * KIB))
    peer.pump()
    advance(echo.endpoint, 40)
    assert (0, "closed") in echo.events
    peer.pump()
    assert peer.answers[stream].reset == ENHANCE_YOUR_CALM
    assert echo.endpoint.held == 0
    peer.close()


def test_what_a_handler_holds_counts_until_its_call_ends(native_counters):
    echo = Echo(max_held_bytes=LIMIT)
    echo.hold = True
    peer = Peer(echo.endpoint)
    peer.open("/test/Stream")
    peer.pump()
    itself = echo.endpoint.ledger["executed"]
    assert 0 < itself < 16 * KIB
    echo.calls[0].hold(3 * MIB)
    echo.calls[0].hold(-MIB)
    assert echo.endpoint.ledger["executed"] == itself + 2 * MIB
    with pytest.raises(ValueError, match="holds 2097152 bytes"):
        echo.calls[0].hold(-3 * MIB)
    echo.calls[0].end(0)
    assert echo.endpoint.held == 0
    peer.close()


def test_calls_are_parked_behind_answers_of_their_own_connection_only(made_lanes):
    lanes = made_lanes()
    greedy, other = Peer(lanes.endpoint, reading=False), Peer(lanes.endpoint)
    streams = [call(lanes, greedy) for _ in range(5)]
    lanes.settle()
    greedy.pump()
    parked = call(lanes, greedy, 10)
    assert lanes.lane.in_flight == 0
    assert answered(lanes, other, 10)
    greedy.h2.reset_stream(streams[0])
    greedy.h2.reset_stream(streams[1])
    greedy.pump()
    lanes.settle()
    greedy.pump()
    assert output(lanes_answer(greedy, parked))[1] == bytes(10)
    for peer in (greedy, other):
        peer.close()


def test_a_window_that_a_response_has_used_up_exactly_holds_up_only_its_stream(made_lanes):
    """The responses behind the one that fills the window wait for the stream's peer: no other call waits for them."""
    lanes = made_lanes()
    peer = Peer(lanes.endpoint, window=1000, reading=False)
    stalled = peer.open("/test.Python/Count")
    peer.pump()
    (count,) = lanes.calls
    count.send_message(bytes(1000 - len(framed(b""))))
    peer.pump()
    assert len(peer.answers[stalled].data) == 1000
    count.send_message(bytes(5 * MIB))
    peer.pump()
    other = call(lanes, peer, 10)
    lanes.settle()
    peer.pump()
    assert peer.answers[other].ended
    count.reset()
    peer.close()


def lanes_answer(peer, stream):
    peer.h2.increment_flow_control_window(1 << 20)
    peer.pump()
    return peer.answers[stream].messages[0]


def test_a_parked_call_may_be_reset(made_lanes):
    lanes = made_lanes()
    peer = Peer(lanes.endpoint, reading=False)
    for _ in range(5):
        call(lanes, peer)
    lanes.settle()
    peer.pump()
    stream = call(lanes, peer, 10)
    assert lanes.endpoint.ledger["queued"] > 10
    peer.h2.reset_stream(stream)
    peer.pump()
    assert lanes.endpoint.ledger["queued"] == 0
    peer.close()
