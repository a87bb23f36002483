"""The end of a connection: nothing that was answered is lost, whatever the client still sends, and it ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import random
import socket
import ssl
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import h2.settings
import pytest
import uvloop

from inferd._native.transport.thread_pool import PoolThreads
from inferd.server.front import keepalive, native
from inferd.server.front.keepalive import FAREWELL, LOOK, SLOWEST, SMALL, Action, ConnectionPolicy, Farewell
from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.tls import Credentials
from tests.conformance.raw import Client, framed
from tests.front.certificates import Authority
from tests.waiting import until

GIVE = "/test.Closing/Give"
SIZE, CALLS = 4 << 20, 4
"""More than the buffers of a line take: when the last byte is framed, some are on their way."""
SMALLER = 200_000
"""So much that all answers are framed at once, and not all of them are in the client's buffer."""
WINDOWS = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: SIZE + (1 << 16)}


@dataclass(slots=True)
class Served:
    """A door with one method, which gives as many bytes as it is asked for, when `go` is set."""

    door: native.NativeDoor
    address: str
    started: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def give(self, message, context):
        self.started.release()
        await self.go.wait()
        return bytes(int(message))


async def serve(address: str, policy: ListenPolicy | None = None, **options) -> Served:
    door = native.NativeDoor(policy=policy, **options)
    served = Served(door, "")
    handler = grpc.unary_unary_rpc_method_handler(served.give)
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Closing", {"Give": handler}),))
    await door.start(address)
    served.address = door.addresses[0]
    return served


def connect(address: str, root: Path | None, ahead: int) -> socket.socket:
    """A socket that takes few bytes ahead."""
    if address.startswith("unix:"):
        line = socket.socket(socket.AF_UNIX)
        line.connect(address.removeprefix("unix:").removeprefix("//"))
    else:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ahead)
        host, port = address.rsplit(":", 1)
        line.connect((host, int(port)))
    line.settimeout(60)
    if root is None:
        return line
    context = ssl.create_default_context(cafile=str(root))
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(line, server_hostname="localhost")


def ask(
    address: str, root: Path | None, before: Callable[[Client], object], size: int = SIZE, ahead: int = 1 << 16
) -> list[int]:
    """Make the calls, wait for `before`, and read slowly, with a WINDOW_UPDATE for each bit.

    Returns the bytes of each answer.
    """
    with Client(connect(address, root, ahead), settings=WINDOWS, at_once=1 << 14) as client:
        client.h2.increment_flow_control_window(CALLS * (SIZE + (1 << 16)))
        streams = [client.headers(GIVE) for _ in range(CALLS)]
        for stream in streams:
            client.data(stream, framed(str(size).encode()), end=True)
        before(client)

        def is_answered() -> bool:
            client.h2.increment_flow_control_window(1)  # sent when the next bytes have come
            return all(client.answers[stream].ended for stream in streams)

        client.receive_until(is_answered)
        return [len(client.answers[stream].data) - 5 for stream in streams]


@pytest.fixture
def lines(tmp_path):
    """What a door listens on, by name: the address, the policy, and the root of the certificate."""
    authority = Authority(tmp_path / "authority")
    pair = authority.issue("server", "DNS:localhost")
    encrypted = ListenPolicy(credentials=Credentials(pair.certificate, pair.key, None))
    return {
        "tcp": ("127.0.0.1:0", None, None),
        "unix": (f"unix:{tmp_path}/s", None, None),
        "tls": ("127.0.0.1:0", encrypted, authority.root),
    }


@pytest.mark.parametrize("line", ["tcp", "tls", "unix"])
def test_a_slow_reader_gets_every_answer_when_the_server_stops(lines, line, monkeypatch):
    """The server has framed the last byte long before the client reads it. The client's WINDOW_UPDATEs meet a socket
    that is read until the client closes its end; a closed one would be reset, and what is on its way would be lost."""
    monkeypatch.setattr(native, "TELLING", 0.0)
    address, policy, root = lines[line]

    async def main() -> list[int]:
        served, reads = await serve(address, policy), threading.Event()
        asked = asyncio.create_task(asyncio.to_thread(ask, served.address, root, lambda _: reads.wait(60)))
        for _ in range(CALLS):
            await served.started.acquire()
        served.go.set()
        stopping = asyncio.create_task(served.door.stop(60.0))
        await asyncio.sleep(0)
        reads.set()
        sizes = await asked
        await stopping
        return sizes

    assert uvloop.run(main()) == [SIZE] * CALLS


def test_an_answer_that_is_given_is_sent_when_the_time_of_a_stop_is_over(lines, monkeypatch):
    """The handlers in Python are over when they have returned their answers, of which the client has read nothing."""
    monkeypatch.setattr(native, "TELLING", 0.0)
    monkeypatch.setattr(native, "PARTING", 60.0)
    address, policy, root = lines["tcp"]

    async def main() -> list[int]:
        served, reads = await serve(address, policy), threading.Event()
        asked = asyncio.create_task(asyncio.to_thread(ask, served.address, root, lambda _: reads.wait(60)))
        for _ in range(CALLS):
            await served.started.acquire()
        served.go.set()
        await until(lambda: served.door.traffic().held["unsent"] > (CALLS - 1) * SIZE)
        stopping = asyncio.create_task(served.door.stop(0.0))
        await asyncio.sleep(0)
        reads.set()
        sizes = await asked
        await stopping
        return sizes

    assert uvloop.run(main()) == [SIZE] * CALLS


@pytest.mark.parametrize("line", ["tcp", "tls"])
def test_a_slow_reader_gets_every_answer_when_its_connection_is_old(lines, line, monkeypatch):
    """The connection ends at --grpc-max-connection-age, while the server serves others."""
    monkeypatch.setattr(keepalive, "AGE_NOTICE", 0.3)
    address, policy, root = lines[line]

    async def main() -> list[int]:
        served = await serve(address, policy, connections=ConnectionPolicy(max_age=0.01))
        loop, begun = asyncio.get_running_loop(), []

        def is_old(client: Client) -> None:
            client.receive_until(lambda: client.goaway is not None and client.goaway.additional_data == b"max_age")
            begun.append(client.goaway.last_stream_id // 2 + 1)  # later ones are refused: clients make them elsewhere
            loop.call_soon_threadsafe(served.go.set)

        sizes = await asyncio.to_thread(ask, served.address, root, is_old)
        await served.door.stop(60.0)
        return sizes[: begun[0]]

    answered = uvloop.run(main())
    assert answered == [SIZE] * len(answered)


@pytest.mark.parametrize("line", ["tcp", "tls", "unix"])
def test_who_never_reads_does_not_keep_a_server_from_stopping(lines, line, monkeypatch):
    """What was framed has the time of an answer (--grpc-send-timeout), then the connection ends without it."""
    monkeypatch.setattr(native, "TELLING", 0.0)
    address, policy, root = lines[line]

    async def main() -> None:
        served, reads = await serve(address, policy, send_timeout=0.3), threading.Event()
        asked = asyncio.create_task(
            asyncio.to_thread(ask, served.address, root, lambda _: reads.wait(60), SMALLER, 1 << 12)
        )
        for _ in range(CALLS):
            await served.started.acquire()
        served.go.set()
        await served.door.stop(3600.0)
        reads.set()
        with contextlib.suppress(OSError):
            await asked

    uvloop.run(asyncio.wait_for(main(), 60))


def test_a_client_is_told_by_the_end_of_the_stream_that_all_is_said(lines):
    """GOAWAY, then the end of what the server writes; nothing that the client still sends is answered by a reset."""

    async def main() -> tuple[bool, bool]:
        served = await serve(lines["tcp"][0])
        client = await asyncio.to_thread(Client, served.address)
        ping = asyncio.create_task(asyncio.to_thread(client.receive_until, lambda: client.goaway is not None))
        stopping = asyncio.create_task(served.door.stop(60.0))
        await ping
        await asyncio.to_thread(client.receive_until, lambda: False)
        closed = client.closed
        client.socket.sendall(bytes(1 << 16))  # nobody reads it as frames any more
        client.socket.shutdown(socket.SHUT_WR)
        rest = client.socket.recv(1)  # raises after a reset
        client.socket.close()
        await stopping
        return closed, rest == b""

    assert uvloop.run(main()) == (True, True)


# ---- calls that are open -------------------------------------------------------------------------------------------


def serve_stream(door: native.NativeDoor, behaviour) -> None:
    handler = grpc.stream_stream_rpc_method_handler(behaviour)
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Closing", {"Talk": handler}),))


def test_a_request_that_waits_to_be_inflated_is_answered_when_the_server_stops(monkeypatch):
    """The request has come whole; that the thread pool is busy is no reason to refuse it."""
    pools = []

    class Busy(PoolThreads):
        def start(self) -> None:
            pools.append(super().start)

    monkeypatch.setattr(native, "PoolThreads", Busy)
    text = random.Random(5).randbytes(40_000)
    compressed = gzip.compress(text)

    async def echo(requests, context):
        async for request in requests:
            await context.write(request)

    def talk(address: str, stop: Callable[[], object]) -> tuple[list[bytes], int]:
        with Client(address) as client:
            stream = client.headers("/test.Closing/Talk", grpc_encoding="gzip")
            rest = framed(compressed, 1)
            while rest:
                client.data(stream, rest[:16000])
                rest = rest[16000:]
            client.h2.ping(bytes(8))
            client.flush()
            client.receive_until(lambda: client.pings > 0)  # the request has come
            stop()
            client.receive_until(lambda: client.goaway is not None and client.goaway.last_stream_id < 1 << 30)
            for start in pools:
                start()
            answer = client.answer(stream)
            return answer.messages, answer.status

    async def main() -> tuple[list[bytes], int]:
        door, loop = native.NativeDoor(), asyncio.get_running_loop()
        serve_stream(door, echo)
        await door.start("127.0.0.1:0")
        stopping = loop.create_future()

        def stop() -> None:
            loop.call_soon_threadsafe(lambda: stopping.set_result(loop.create_task(door.stop(60.0))))

        talked = await asyncio.to_thread(talk, door.addresses[0], stop)
        await (await stopping)
        return talked

    messages, status = uvloop.run(main())
    assert messages == [text]
    assert status == grpc.StatusCode.UNAVAILABLE.value[0]  # the client had not ended its requests


def test_a_call_that_the_transport_ends_while_its_handler_writes_is_no_error(caplog):
    """The client sent more than it may and does not read the answer, so the call is not closed yet."""

    async def main() -> str:
        over = asyncio.get_running_loop().create_future()

        async def tick(requests, context):
            try:
                while True:
                    await context.write(b"tick")
                    await asyncio.sleep(0.001)
            except Exception as error:
                over.set_result(type(error).__name__)
                raise

        door = native.NativeDoor(max_message_bytes=10)
        serve_stream(door, tick)
        await door.start("127.0.0.1:0")
        client = Client(door.addresses[0], settings={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        stream = client.headers("/test.Closing/Talk")
        await asyncio.to_thread(client.receive_until, lambda: client.answers[stream].headers)
        client.data(stream, framed(bytes(100)))
        found = await over
        client.socket.close()
        await door.stop(60.0)
        return found

    assert uvloop.run(main()) == "CallOverError"
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_cancelled_call_lets_go_of_its_request_at_once():
    """Requests may be large, and their charge ends with the call: they must not wait for Python's collector."""

    class Request:
        def __init__(self, message: bytes) -> None:
            requests.append(weakref.ref(self))

    async def wait(request, context):
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        door = native.NativeDoor()
        handler = grpc.unary_unary_rpc_method_handler(wait, Request)
        door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Closing", {"Wait": handler}),))
        await door.start("127.0.0.1:0")
        with Client(await asyncio.to_thread(connect, door.addresses[0], None, 1 << 16)) as client:
            stream = client.headers("/test.Closing/Wait")
            client.data(stream, framed(b""), end=True)
            await begun.wait()
            assert requests[0]() is not None
            client.reset(stream)
            await until(lambda: requests[0]() is None)
        await door.stop(60.0)

    requests: list[weakref.ref[Request]] = []
    begun = asyncio.Event()
    gc.disable()
    try:
        uvloop.run(main())
    finally:
        gc.enable()


# ---- bytes that wait for the socket ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [0, 20], ids=["nothing", "a trickle"])
@pytest.mark.parametrize("line", ["tcp", "tls", "unix"])
def test_who_does_not_take_what_is_framed_loses_the_connection(lines, line, at_once, caplog):
    """The windows are open: only the socket is full. A connection that takes nothing of it in the time of an answer, or
    so little that it would take hours, ends, and nothing of it stays charged; the log says why. A neighbour is served
    meanwhile."""
    address, policy, root = lines[line]

    async def main() -> list[int]:
        served = await serve(address, policy, send_timeout=0.5)
        served.go.set()
        with Client(await asyncio.to_thread(connect, served.address, root, 1 << 14), settings=WINDOWS) as client:
            client.h2.increment_flow_control_window(CALLS * SIZE)
            for _ in range(CALLS):
                client.data(client.headers(GIVE), framed(str(SIZE).encode()), end=True)
                await served.started.acquire()
            neighbour = await asyncio.to_thread(ask, served.address, root, lambda _: None, SMALLER)
            client.socket.setblocking(False)

            def is_alone() -> bool:
                with contextlib.suppress(OSError):
                    client.socket.recv(at_once)
                return not served.door.traffic().connections

            await until(is_alone)
        assert not any(served.door.traffic().held.values())
        await served.door.stop(60.0)
        return neighbour

    assert uvloop.run(main()) == [SMALLER] * CALLS
    assert ["has taken no output for" in record.getMessage() for record in caplog.records] == [True]


# ---- the limit in time ----------------------------------------------------------------------------------------------

POLICY = ConnectionPolicy(send_timeout=10)


def ends(waiting, moved, policy=POLICY, until=10_000.0) -> float:
    """When a connection is dropped of which so much is waiting, and has moved, at each time."""
    farewell, now = Farewell(policy, 0.0), 0.0
    while now < until:
        now = farewell.deadline
        if farewell.due(now, waiting=waiting(now), moved=moved(now)) is Action.DROP:
            return now
        assert farewell.deadline > now
    return until


def never(now: float) -> int:
    return 0


def test_without_progress_the_last_bytes_have_the_time_of_an_answer():
    assert ends(lambda now: 1 << 20, never) == pytest.approx(10, abs=LOOK)


def test_progress_gives_time():
    """At the slowest rate of an answer, and above, a connection stays until everything has been received."""
    size = 4 * SMALL
    rate = size / 40
    assert 40 <= ends(lambda now: max(0, int(size - rate * now)), lambda now: int(rate * now)) <= 41 + FAREWELL
    trickle = partial(lambda rate, now: int(rate * now), SLOWEST / 2)
    assert ends(lambda now: size, trickle) == pytest.approx(20, abs=2 * LOOK)


def test_a_peer_that_has_received_everything_has_a_moment_to_close():
    assert ends(never, never) == pytest.approx(FAREWELL, abs=2 * LOOK)
    assert ends(lambda now: int(now < 5), never) == pytest.approx(5 + FAREWELL, abs=2 * LOOK)
