"""Requests that are not complete: bounded in bytes over all connections and in time, and charged to their client."""

from __future__ import annotations

import math

import pytest

from inferd._native.memory.resource import live_counters
from inferd._native.transport.call import EVENT_DEADLINE
from inferd._native.transport.client import ClientUse
from inferd._native.transport.connection import Connection
from tests.native.h2peer import Clock, Echo, Peer, framed

KIB = 1 << 10
LIMIT = 64 * KIB
CALL = 2 * KIB  # of memory beside the bytes of its message
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 4, 8


pytestmark = pytest.mark.usefixtures("native_counters")


def begun(lanes, peer, size, part):
    """A call of which only a part of the message has come."""
    stream = peer.open()
    peer.send(stream, framed(lanes.request(bytes(size)))[:part])
    peer.pump()
    return stream


def finished(lanes, peer, stream):
    lanes.settle()
    peer.pump()
    return peer.answers[stream]


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_an_announced_length_takes_nothing(made_lanes):
    """Memory follows the bytes that come, not those that are promised."""
    lanes = made_lanes()
    peer = Peer(lanes.endpoint)
    for _ in range(100):
        stream = peer.open()
        peer.send(stream, b"\0" + (0xFFFFFFFF).to_bytes(4, "big"))
    peer.pump()
    assert lanes.endpoint.held == 100 * CALL, "the calls themselves"
    streams = list(peer.answers)
    for stream in streams:
        peer.send(stream, bytes(100))
    peer.pump()
    assert lanes.endpoint.held == 100 * (4 * KIB + CALL), "a page each"
    assert live_counters()["blocks"] >= 100
    peer.send(streams[0], bytes(60 * KIB))
    peer.pump()
    assert lanes.endpoint.held < (400 + 2 * 64) * KIB + 100 * CALL, "twice what has come"
    peer.close()
    assert lanes.endpoint.held == 0


@pytest.mark.parametrize("step", [1000, 5000, 16384])
def test_messages_of_every_size_arrive_whole(step):
    echo = Echo()
    peer = Peer(echo.endpoint, window=1 << 24)
    for size in (0, 1, 63, 64, 65, 4095, 4097, 300 * KIB, 1024 * KIB):
        stream = peer.open("/test/Echo")
        message = framed(bytes(number % 251 for number in range(size)))
        for at in range(0, len(message), step):
            peer.send_all(stream, message[at : at + step], end=at + step >= len(message))
        peer.pump()
        assert [framed(message) for message in peer.answers[stream].messages] == [message]
    peer.close()
    assert echo.endpoint.held == 0


def test_a_message_over_the_limit_is_refused_when_it_is_announced():
    """The stream that announces it has sent a message within the limit before."""
    echo = Echo(max_message=KIB)
    peer = Peer(echo.endpoint)
    stream = peer.open("/test/Stream")
    peer.send(stream, framed(bytes(KIB)))
    peer.pump()
    peer.send(stream, b"\0" + (KIB + 1).to_bytes(4, "big"))
    peer.pump()
    assert peer.answers[stream].messages == [bytes(KIB)]
    assert peer.answers[stream].status == RESOURCE_EXHAUSTED
    assert peer.answers[stream].details == "Received message larger than max (1025 vs. 1024)"
    peer.close()


def test_who_owes_most_goes_when_there_is_no_more_room(made_lanes):
    lanes = made_lanes(max_held_bytes=16 * 64 * KIB)
    slow, late = Peer(lanes.endpoint), Peer(lanes.endpoint)
    for _ in range(20):
        begun(lanes, slow, 50 * KIB, 30 * KIB)
    third = begun(lanes, late, 40 * KIB, 30 * KIB)
    slow.pump()
    refused = [answer for answer in slow.answers.values() if answer.headers]
    assert 0 < len(refused) < 5
    assert {answer.status for answer in refused} == {RESOURCE_EXHAUSTED}
    assert "more bytes than its limit of 1048576" in refused[0].headers["grpc-message"]
    assert "grpc-status-details-bin" in refused[0].headers
    assert not late.answers[third].headers
    assert lanes.endpoint.held <= 16 * 64 * KIB
    for peer in (slow, late):
        peer.close()
    assert lanes.endpoint.held == 0


def test_what_arrives_whole_is_served_while_others_fill_the_room(made_lanes):
    lanes = made_lanes(max_held_bytes=LIMIT)
    slow, quick = Peer(lanes.endpoint), Peer(lanes.endpoint)
    for _ in range(8):
        begun(lanes, slow, 40 * KIB, 30 * KIB)
    for _ in range(10):
        stream = quick.open()
        quick.send_all(stream, framed(lanes.request(b"x" * 1000)))
        assert finished(lanes, quick, stream).status == 0
    assert lanes.endpoint.held <= LIMIT
    slow.close()
    quick.close()


def test_credit_that_was_kept_back_comes_when_messages_are_taken():
    echo = Echo()
    echo.hold = True
    peer = Peer(echo.endpoint)
    stream = peer.open("/test/Hold")
    message = framed(bytes(16 * KIB))
    for _ in range(200):
        assert peer.send(stream, message) == len(message)
        peer.pump()
    assert peer.h2.local_flow_control_window(stream) < 2000 * KIB, "credit was given for what nobody takes"
    echo.answer(echo.calls[0])
    peer.pump()
    assert echo.endpoint.ledger["queued"] == 0
    assert peer.h2.local_flow_control_window(stream) > 3900 * KIB
    peer.close()


@pytest.mark.parametrize("end", [False, True], ids=["open", "half-closed"])
def test_a_reset_gives_the_room_back(made_lanes, end):
    lanes = made_lanes(max_held_bytes=LIMIT)
    peer = Peer(lanes.endpoint)
    stream = peer.open()
    message = framed(lanes.request(bytes(20 * KIB)))
    peer.send(stream, message if end else message[:1000], end=end)
    peer.h2.reset_stream(stream)
    peer.pump()
    assert lanes.endpoint.held == 0
    peer.close()


# ---- time -----------------------------------------------------------------------------------------------------------


def advance(lanes, seconds):
    lanes.endpoint.clock.now += seconds
    lanes.endpoint.expire()


@pytest.mark.parametrize("sent", [0, 3, 100])
def test_a_request_that_does_not_arrive_ends(made_lanes, sent):
    lanes = made_lanes(receive_timeout=30.0)
    peer = Peer(lanes.endpoint)
    stream = begun(lanes, peer, KIB, sent)
    advance(lanes, 29.9)
    peer.pump()
    assert not peer.answers[stream].headers
    advance(lanes, 0.2)
    peer.pump()
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    assert "has not arrived within 30.1 s" in peer.answers[stream].headers["grpc-message"]
    assert peer.connection.streams == 0
    peer.close()


def test_a_request_whose_stream_does_not_end_is_told_so(made_lanes):
    """The message is complete; only END_STREAM is missing."""
    lanes = made_lanes(receive_timeout=0.5)
    peer = Peer(lanes.endpoint)
    stream = begun(lanes, peer, KIB, 0)
    peer.send(stream, framed(lanes.request(bytes(KIB))))
    peer.pump()
    advance(lanes, 0.6)
    peer.pump()
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    assert "within 0.6 s: its message is complete" in peer.answers[stream].headers["grpc-message"]
    peer.close()


@pytest.mark.parametrize("silent", [0, 20])
def test_a_byte_per_second_does_not_buy_time(made_lanes, silent):
    """The time of a request begins with its call, and not with its first byte."""
    lanes = made_lanes(receive_timeout=30.0)
    peer = Peer(lanes.endpoint)
    stream = begun(lanes, peer, KIB, 0)
    peer.pump()
    advance(lanes, silent)
    message = framed(lanes.request(bytes(KIB)))
    for second in range(31 - silent):
        peer.send(stream, message[second : second + 1])
        peer.pump()
        advance(lanes, 1.0)
    peer.pump()
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    peer.close()


def test_a_large_request_has_a_second_more_for_each_16_kib(made_lanes):
    lanes = made_lanes(receive_timeout=30.0)
    peer = Peer(lanes.endpoint)
    message = framed(lanes.request(bytes(1024 * KIB)))
    stream = peer.open()
    for at in range(0, len(message), 20 * KIB):  # 53 s
        part = message[at : at + 20 * KIB]
        peer.send(stream, part, end=at + len(part) == len(message))
        peer.pump()
        advance(lanes, 1.0)
    assert finished(lanes, peer, stream).status == 0
    peer.close()


def test_the_rest_of_a_large_request_must_come_faster(made_lanes):
    """16 KiB a second keep a MiB open for a minute, and what is more than that for a quarter of a minute each."""
    lanes = made_lanes(receive_timeout=30.0)
    peer = Peer(lanes.endpoint)
    message = framed(lanes.request(bytes(4096 * KIB)))
    stream = peer.open()
    seconds = 0
    for at in range(0, len(message), 20 * KIB):
        if peer.answers[stream].headers:
            break
        peer.send_all(stream, message[at : at + 20 * KIB], end=False)
        peer.pump()
        advance(lanes, 1.0)
        peer.pump()
        seconds += 1
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    assert 94 < seconds < 102
    peer.close()


def test_what_is_complete_needs_no_timer(made_lanes):
    """A call that is complete in the read in which it begins, and whose response goes out at once, sets no timer."""
    lanes = made_lanes(receive_timeout=30.0, send_timeout=30.0)
    peer = Peer(lanes.endpoint)
    peer.pump()
    for _ in range(3):
        streams = []
        for _ in range(10):
            streams.append(peer.open(metadata=(("grpc-timeout", "5S"),)))
            peer.send(streams[-1], framed(lanes.request(b"x")), end=True)
        peer.feed(peer.h2.data_to_send())
        assert lanes.endpoint.timers.count == 0
        lanes.settle()
        peer.pump()
        assert [peer.answers[stream].status for stream in streams] == [0] * 10
        assert lanes.endpoint.timers.count == 0
    stream = begun(lanes, peer, KIB, 10)
    assert lanes.endpoint.timers.count == 1
    peer.send_all(stream, framed(lanes.request(bytes(KIB)))[10:])
    assert finished(lanes, peer, stream).status == 0
    assert lanes.endpoint.timers.count == 0, "it goes with its call"
    peer.close()


def test_headers_that_do_not_arrive_end_the_connection(made_lanes):
    lanes = made_lanes(receive_timeout=30.0)
    peer = Peer(lanes.endpoint)
    peer.pump()
    peer.open(end=False)
    peer.feed(peer.h2.data_to_send()[:-3])
    advance(lanes, 31.0)
    peer.pump()
    assert peer.connection.finished
    peer.close()


def test_a_stream_may_be_silent_between_its_messages():
    echo = Echo(receive_timeout=30.0)
    echo.endpoint.clock = Clock()
    peer = Peer(echo.endpoint)
    stream = peer.open("/test/Stream")
    for _ in range(3):
        peer.pump()
        echo.endpoint.clock.now += 100
        echo.endpoint.expire()
        peer.send(stream, framed(b"x"))
    peer.send(stream, framed(b"xyz")[:6])
    peer.pump()
    echo.endpoint.clock.now += 31
    echo.endpoint.expire()
    peer.pump()
    assert peer.answers[stream].messages == [b"x"] * 3
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    peer.close()


def test_a_python_call_with_one_request_must_send_it():
    echo = Echo(receive_timeout=30.0)
    echo.endpoint.clock = Clock()
    peer = Peer(echo.endpoint)
    stream = peer.open("/test/Unary")
    peer.pump()
    echo.calls[0].expect_one()
    echo.endpoint.clock.now += 31
    echo.endpoint.expire()
    peer.pump()
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    peer.close()


# ---- deadlines ------------------------------------------------------------------------------------------------------


def test_the_deadline_counts_from_the_arrival_of_the_headers(made_lanes):
    lanes = made_lanes()
    peer = Peer(lanes.endpoint)
    stream = peer.open(metadata=(("grpc-timeout", "5S"),))
    peer.pump()
    lanes.endpoint.clock.now += 5.0
    peer.send_all(stream, framed(lanes.request(b"x")))
    peer.pump()
    answer = peer.answers[stream]
    assert (answer.status, answer.headers["grpc-message"]) == (DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert not lanes.lane.in_flight
    peer.close()


@pytest.mark.parametrize("receive_timeout", [math.inf, 30.0])
def test_a_call_that_is_not_complete_ends_at_its_deadline_and_not_before(made_lanes, receive_timeout):
    lanes = made_lanes(receive_timeout=receive_timeout)
    peer = Peer(lanes.endpoint)
    streams = [peer.open(metadata=(("grpc-timeout", f"{5000 - number}m"),)) for number in range(3)]
    peer.pump()
    assert lanes.endpoint.timers.count == 3
    for after, ended in ((4.9979, 0), (4.9981, 1), (4.9991, 2), (4.9999, 2), (5.0001, 3)):
        lanes.endpoint.clock.now = 1000.0 + after
        lanes.endpoint.expire()
        peer.pump()
        assert [peer.answers[stream].status for stream in reversed(streams)] == (
            [DEADLINE_EXCEEDED] * ended + [None] * (3 - ended)
        )
    peer.close()


@pytest.mark.parametrize("receive_timeout", [math.inf, 30.0])
def test_a_deadline_holds_where_the_headers_come_in_parts(made_lanes, receive_timeout):
    """The deadline cannot end the call before its headers are complete, and ends it as soon as they are."""
    lanes = made_lanes(receive_timeout=receive_timeout)
    peer = Peer(lanes.endpoint)
    peer.pump()
    stream = peer.open(metadata=(("grpc-timeout", "5S"),))
    data = peer.h2.data_to_send()
    peer.feed(data[:-3])
    advance(lanes, 6.0)
    peer.feed(data[-3:])
    lanes.endpoint.expire()
    peer.pump()
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    other = begun(lanes, peer, KIB, 10)
    advance(lanes, 6.0)
    peer.pump()
    assert not peer.answers[other].headers, "the connection goes on"
    peer.close()


def test_the_owner_of_a_python_call_hears_of_its_deadline():
    """Once, at the deadline; what it does then is its own."""
    echo = Echo()
    echo.hold = True
    echo.endpoint.clock = Clock()
    peer = Peer(echo.endpoint)
    stream = peer.open("/test/Echo", metadata=(("grpc-timeout", "5S"),))
    peer.send_all(stream, framed(b"x"))
    peer.pump()
    for seconds, told in ((4.9, 0), (0.2, 1), (100.0, 1)):
        echo.endpoint.clock.now += seconds
        echo.endpoint.expire()
        assert [kind for _, kind in echo.events].count(EVENT_DEADLINE) == told
    echo.answer(echo.calls[0])
    peer.pump()
    assert peer.answers[stream].messages == [b"x"]
    peer.close()


def test_a_parked_call_ends_at_its_deadline(made_lanes):
    """The call is parked behind responses that its peer does not read, which does not give it a new deadline."""
    lanes = made_lanes()
    peer = Peer(lanes.endpoint, reading=False)
    for _ in range(5):
        stream = peer.open()
        peer.send_all(stream, framed(lanes.request(bytes(1024 * KIB))))
    lanes.settle()
    peer.pump()
    stream = peer.open(metadata=(("grpc-timeout", "5S"),))
    peer.send_all(stream, framed(lanes.request(b"x")))
    peer.pump()
    assert not peer.answers[stream].headers
    advance(lanes, 6.0)
    peer.pump()
    assert peer.answers[stream].status == DEADLINE_EXCEEDED
    peer.close()


# ---- clients --------------------------------------------------------------------------------------------------------


def peer_of(lanes, use):
    peer = Peer(lanes.endpoint)
    peer.connection.close()
    peer.connection = Connection(lanes.endpoint, "test", use=use)
    peer.connection.flush = lambda: None
    return peer


def test_calls_of_a_client_count_over_all_its_connections(made_lanes):
    lanes = made_lanes()
    use = ClientUse("10.0.0.7", max_calls=3)
    first, second, stranger = peer_of(lanes, use), peer_of(lanes, use), Peer(lanes.endpoint)
    begun(lanes, first, KIB, 10)
    begun(lanes, first, KIB, 10)
    begun(lanes, second, KIB, 10)
    refused = begun(lanes, second, KIB, 10)
    answer = second.answers[refused]
    assert answer.status == RESOURCE_EXHAUSTED
    assert answer.headers["grpc-message"] == "client 10.0.0.7 has 4 calls in flight, which is more than its limit of 3"
    stream = stranger.open()
    stranger.send_all(stream, framed(lanes.request(b"x")))
    assert finished(lanes, stranger, stream).status == 0
    first.close()
    stream = second.open()
    second.send_all(stream, framed(lanes.request(b"x")))
    assert finished(lanes, second, stream).status == 0
    for peer in (second, stranger):
        peer.close()
    assert use.calls == 0


def test_bytes_of_a_client_count_from_their_arrival_until_the_answer_is_read(made_lanes):
    lanes = made_lanes()
    use = ClientUse("user 1000", max_bytes=LIMIT)
    peer = peer_of(lanes, use)
    hog = peer_of(lanes, use)
    hog.reading = False
    hog.h2.update_settings({4: 0})  # INITIAL_WINDOW_SIZE: nothing may be sent to it
    for size in (40, 20):
        stream = hog.open()
        hog.send_all(stream, framed(lanes.request(bytes(size * KIB))))
        lanes.settle()
        hog.pump()
    assert 60 * KIB < use.bytes_held < 62 * KIB
    refused = peer.open()
    peer.send_all(refused, framed(lanes.request(bytes(4 * KIB))))
    peer.pump()
    assert peer.answers[refused].status == RESOURCE_EXHAUSTED
    assert peer.answers[refused].headers["grpc-message"].startswith("client user 1000 has ")
    hog.close()
    assert use.bytes_held == 0
    stream = peer.open()
    peer.send_all(stream, framed(lanes.request(b"x")))
    assert finished(lanes, peer, stream).status == 0
    assert use.bytes_held == 0
    peer.close()
