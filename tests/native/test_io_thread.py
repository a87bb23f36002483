"""The I/O thread beside Python: no event between two questions of Python is lost, and Python gives way between events.
The test is the event loop: it decides when Python hears of what the thread has done meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import tempfile
import threading

import grpc
import pytest
from grpc.aio import EOF

from inferd._native.timers import TimersHandle
from inferd._native.transport.call import Call
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.io_thread import IoThreads
from inferd.server.front.connection_monitor import ConnectionMonitor
from inferd.server.front.context import NativeContext
from inferd.server.front.keepalive import ConnectionPolicy
from tests.conformance.raw import Client, framed
from tests.native.h2peer import INFER, Lanes
from tests.native.threaded import Threaded
from tests.waiting import wait_until

TALK = grpc.stream_stream_rpc_method_handler(lambda requests, context: None)


class Door(Threaded):
    """A door that keeps the calls of which Python has heard in `calls`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        super().__init__(self.calls.append)

    def connect(self) -> tuple[Client, Connection]:
        """A client of it; the connection is the server's end."""
        ours, theirs = self.sockets()
        connection = Connection(self.endpoint, "unix:")
        self.io.take(connection, theirs.fileno())
        return Client(ours), connection


@pytest.fixture
def door():
    with contextlib.closing(Door()) as made:
        yield made


def ping(client: Client) -> None:
    """Send a PING, and wait until the I/O thread has handled it and everything before it."""
    pings = client.pings + 1
    client.h2.ping(bytes(8))
    client.flush()
    client.receive_until(lambda: client.pings == pings)


class Between:
    """A call on which `happens` comes between two questions of Python: behind the first one that gets `found`."""

    def __init__(self, call: Call, question: str, found: object, happens) -> None:
        self._call, self._question, self._found, self._happens = call, question, found, happens

    @property
    def on_event(self):
        return self._call.on_event

    @on_event.setter
    def on_event(self, hear) -> None:
        self._call.on_event = hear

    def __getattr__(self, name: str):
        if name != self._question:
            return getattr(self._call, name)
        given = getattr(self._call, name)
        if not callable(given):
            return self._answer(given)
        return lambda: self._answer(given())

    def _answer(self, given: object):
        if given == self._found:
            happens, self._happens = self._happens, lambda: None
            happens()
        return given


def test_the_last_message_comes_between_two_questions_of_its_handler(door):
    """The handler finds no message; then the last one and the end come, before it asks whether the client has ended."""
    client, _ = door.connect()
    stream = client.headers("/test.Door/Talk")
    ping(client)
    door.timers.run_events()

    def rest() -> None:
        client.data(stream, framed(b"last"), end=True)
        ping(client)

    async def read() -> tuple[object, object]:
        context = NativeContext(Between(door.calls[0], "take_message", None, rest), TALK)
        reading = asyncio.create_task(context.read())
        await asyncio.sleep(0)
        door.timers.run_events()
        return await reading, await context.read()

    assert asyncio.run(read()) == (b"last", EOF)


def test_a_client_leaves_before_its_handler_ends_the_call(door):
    """The handler has not heard of it, and gets no error."""
    client, _ = door.connect()
    stream = client.headers("/test.Door/Talk")
    ping(client)
    door.timers.run_events()

    context = NativeContext(door.calls[0], TALK)
    client.reset(stream)
    ping(client)
    context.finish(grpc.StatusCode.OK, "")
    assert not door.calls[0].open


def test_what_happens_while_python_hears_of_it_is_heard_the_next_time(door):
    """The event that was the last is withdrawn while Python runs the first, whose client makes a new one each time that
    it is heard: the event loop must come to its other work."""
    busy, connection = door.connect()
    other, _ = door.connect()
    heard = []

    def hear() -> None:
        heard.append(None)
        if len(heard) == 1:
            other.reset(stream)
            ping(other)
        if len(heard) < 20:
            ping(busy)

    connection.on_ping = hear
    ping(busy)
    stream = other.headers("/test.Door/Talk")
    other.h2.update_settings({})
    other.flush()
    wait_until(lambda: door.endpoint.streams == 1)
    door.timers.run_events()
    assert len(heard) <= 2
    assert not door.calls


def test_pings_of_which_python_hears_late_are_no_strikes_if_responses_came_between_them(door):
    """A client measures the bandwidth with a PING behind each response, while Python is busy for long."""
    client, connection = door.connect()
    with monitored(door, connection):
        for _ in range(5):
            assert client.answer(client.headers("/test.Door/Talk", pseudo_method="GET")).headers[":status"] == "405"
            ping(client)
        door.timers.run_events()
        ping(client)
        assert client.goaway is None
        for _ in range(3):
            ping(client)
        door.timers.run_events()
        client.receive_until(lambda: client.goaway is not None)


@contextlib.contextmanager
def monitored(door: Door, connection: Connection):
    """The connection under the rules of a server without options."""
    monitor = ConnectionMonitor(door, connection, ConnectionPolicy(), door.timers, door.timers.time())
    yield
    monitor.stop()


def test_a_call_that_is_reset_before_python_hears_of_it_leaves_the_loop_asleep(door):
    """The descriptor that wakes the event loop is not readable any more, or the loop would turn without end."""
    client, _ = door.connect()
    client.reset(client.headers("/test.Door/Talk"))
    wait_until(lambda: door.endpoint.resets == 1)
    door.timers.run_events()
    assert not door.calls
    assert select.select([door.timers.hear()], [], [], 0)[0] == []


def test_python_hears_of_what_another_thread_than_the_first_has_delivered():
    """A thread that has executed a request itself delivers the response, while the first thread sleeps. Who waits for a
    delivery hears of it."""
    lanes, news = Lanes(), []
    lanes.bridge.on_news = lambda: news.append(None)
    lanes.bridge.watch(True)
    lanes.bridge.timers.hear()
    io = IoThreads(lanes.endpoint, 2)
    lanes.service.deliver_on(io)
    io.start()
    ends = [socket.socketpair() for _ in range(2)]
    connections = [Connection(lanes.endpoint, "unix:") for _ in ends]
    for (ours, theirs), connection in zip(ends, connections, strict=True):
        ours.settimeout(60)
        theirs.setblocking(False)
        io.take(connection, theirs.fileno())
    for ours, _ in ends:
        client = Client(ours)
        ping(client)
    for _ in range(20):  # the instance's own thread may execute the first ones
        lanes.bridge.timers.run_events()
        news.clear()
        stream = client.headers(INFER)
        client.data(stream, framed(lanes.request(b"some")), end=True)
        assert client.answer(stream).status == 0
        wait_until(lambda: lanes.bridge.timers.run_events() or news)
    io.stop()
    lanes.service.deliver_on(None)
    for ours, theirs in ends:
        ours.close()
        theirs.close()
    lanes.close()


@pytest.mark.parametrize("times", [1, 3])
def test_a_thread_that_does_not_start_leaves_the_endpoint_to_the_loop(monkeypatch, times):
    """The system refuses the thread. The next attempt serves; without one, the endpoint works without a thread."""
    timers = TimersHandle()
    io = IoThreads(Endpoint(lambda call: None, timers=timers))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(times):
            with pytest.raises(RuntimeError):
                io.start()
    client, theirs = socket.socketpair()
    with client, theirs:
        io.start()
        theirs.setblocking(False)
        connection = Connection(io.endpoint)
        io.take(connection, theirs.fileno())
        ping(Client(client))
        io.stop()


def test_timers_that_cannot_be_watched_stop_the_start():
    """Without them no call would end at its deadline. A file stands for a descriptor that cannot be watched."""
    timers = TimersHandle()
    io = IoThreads(Endpoint(lambda call: None, timers=timers))
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), timers.fd)
    with pytest.raises(OSError, match="cannot watch the timers"):
        io.start()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inferd-io")]
