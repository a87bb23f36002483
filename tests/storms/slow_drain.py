"""Answers that are in flight when a connection ends: slow readers behind a delaying proxy, again and again.

    python -m tests.storms.drain --slow --times 1000
    python -m tests.storms.drain --envoy 60

Each round has a door of its own, with one I/O thread or three, on TCP, TLS or a unix socket; a proxy that forwards
every piece after a delay; a client (of frames, or grpcio) with some calls whose answers have up to 16 MiB; and an end
during these calls, by the server's stop or by --grpc-max-connection-age. What must hold: every call that a handler
began is answered OK, with all its bytes. With --envoy, clients call through Envoy for that many seconds, while its
connections to the server end by age: no call may fail.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import random
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import h2.settings
import uvloop

from bench import inferd, messages
from bench.repository import Identity, write
from inferd.server.front import keepalive
from inferd.server.front.keepalive import ConnectionPolicy
from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.native import NativeDoor
from inferd.server.front.tls import Credentials
from inferd_client.pb import grpc_service_pb2 as pb
from tests.clients.toolchains import envoy
from tests.conformance.raw import Client
from tests.framing import framed
from tests.front.certificates import Authority
from tests.front.test_closing import connect
from tests.observe.scraping import scrape
from tests.proxy import proxies

GIVE = "/bench.Drain/Give"
LARGEST = 16 << 20
MODEL = Identity("drained", (("FP32", 1),))
PIECE = 64 << 10  # bytes that the proxy takes at a time
LINES, CAUSES, CLIENTS, IO_THREADS = ("tcp", "tls", "unix"), ("stop", "age"), ("frames", "grpcio"), (1, 3)


@dataclass
class Round:
    """One connection's end."""

    line: str
    cause: str
    client: str
    io_threads: int
    sizes: list[int]
    delay: float  # seconds of the proxy for each piece
    after: float  # seconds between the first call and the end
    began: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    @property
    def lost(self) -> set[int]:
        return self.began - self.answered


def drawn(number: int, chance: random.Random) -> Round:
    sizes = [int(math.exp(chance.uniform(math.log(1 << 10), math.log(LARGEST)))) for _ in range(chance.randint(1, 4))]
    kinds = (LINES[number % 3], CAUSES[number // 3 % 2], CLIENTS[number // 6 % 2], IO_THREADS[number // 12 % 2])
    return Round(*kinds, sizes, chance.uniform(0, 0.004), chance.uniform(0, 0.1))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Forward each piece from the reader, and the end of the stream."""
    with contextlib.suppress(OSError, RuntimeError):  # uvloop raises the latter for closed sockets
        while data := await reader.read(PIECE):
            await asyncio.sleep(delay)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def proxy(address: str, delay: float) -> asyncio.Server:
    """Listens on TCP, and passes on to `address`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if address.startswith("unix:"):
                other = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                other = await asyncio.open_connection(*address.rsplit(":", 1))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, other[1], delay), pump(other[0], writer, delay))
        writer.close()
        other[1].close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def ask_by_frames(at: Round, address: str, root: Path | None) -> None:
    windows = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20}
    with Client(connect(address, root, 1 << 16), settings=windows) as client:
        client.h2.increment_flow_control_window(4 << 20)
        calls = {}
        for number, size in enumerate(at.sizes):
            calls[number] = client.headers(GIVE)
            client.data(calls[number], framed(f"{number} {size}".encode()), end=True)
        over = lambda answer: answer.ended or answer.reset is not None  # noqa: E731
        client.receive_until(lambda: all(over(client.answers[stream]) for stream in calls.values()))
        for number, stream in calls.items():
            answer = client.answers[stream]
            if answer.ended and answer.status == 0 and len(answer.data) == at.sizes[number] + 5:
                at.answered.add(number)


def ask_by_grpcio(at: Round, address: str, root: Path | None) -> None:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    if root is None:
        channel = grpc.insecure_channel(address, options)
    else:
        options.append(("grpc.ssl_target_name_override", "localhost"))
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root.read_bytes()), options)
    with channel:
        give = channel.unary_unary(GIVE)
        calls = [give.future(f"{n} {size}".encode(), timeout=60) for n, size in enumerate(at.sizes)]
        for number, call in enumerate(calls):
            try:
                if len(call.result()) == at.sizes[number]:
                    at.answered.add(number)
            except grpc.RpcError as error:
                at.errors.append(f"{number}: {error.code()} {error.details()}")


async def play(at: Round, folder: Path, policy: ListenPolicy, root: Path) -> None:
    started = asyncio.Event()

    async def give(message: bytes, _: Any) -> bytes:
        number, size = map(int, message.split())
        at.began.add(number)
        started.set()
        await asyncio.sleep(at.after / 2)
        return bytes(size)

    age = ConnectionPolicy(max_age=at.after) if at.cause == "age" else ConnectionPolicy()
    door = NativeDoor(policy=policy if at.line == "tls" else None, connections=age, io_threads=at.io_threads)
    handler = grpc.unary_unary_rpc_method_handler(give)
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Drain", {"Give": handler}),))
    await door.start(f"unix:{folder}/s" if at.line == "unix" else "127.0.0.1:0")
    between = await proxy(door.addresses[0], at.delay)
    address = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
    client = ask_by_frames if at.client == "frames" else ask_by_grpcio
    asked = asyncio.create_task(asyncio.to_thread(client, at, address, root if at.line == "tls" else None))
    if at.cause == "stop":
        await started.wait()
        await asyncio.sleep(at.after)
        await door.stop(60.0)
    try:
        await asked
    except (OSError, TimeoutError) as error:
        at.errors.append(repr(error))
    if at.cause == "age":
        await door.stop(60.0)
    between.close()


async def play_all(times: int, seed: int, folder: Path) -> dict[str, Any]:
    keepalive.AGE_NOTICE = 0.1
    pair = (authority := Authority(folder / "authority")).issue("server", "DNS:localhost")
    policy = ListenPolicy(credentials=Credentials(pair.certificate, pair.key, None))
    chance = random.Random(seed)
    began: collections.Counter[str] = collections.Counter()
    rounds = received = 0
    faults = []
    for number in range(times):
        at = drawn(number, chance)
        await asyncio.wait_for(play(at, folder, policy, authority.root), 180)
        rounds += 1
        began[f"{at.line}, {at.cause}, {at.client}"] += len(at.began)
        received += sum(at.sizes[each] for each in at.answered)
        if at.lost:
            faults.append(f"round {number}: {at}")
    return {"rounds": rounds, "calls_begun": dict(began), "mib": received >> 20, "lost": faults}


def run(times: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="inferd-drain-") as folder:
        return uvloop.run(play_all(times, seed, Path(folder)))


# ---------------------------------------------------------------------------------------------------------------------
# Envoy in between


def call_through(address: str, seed: int, end: float, errors: list[str]) -> int:
    """Infer with tensors of up to 16 MiB until `end`; the number of right answers."""
    chance, right = random.Random(seed), 0
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer(messages.identity(64, MODEL.name).request, wait_for_ready=True, timeout=60)
        while time.monotonic() < end:
            size = int(math.exp(chance.uniform(math.log(1 << 10), math.log(LARGEST)))) // 4 * 4
            exchange = messages.identity(size, MODEL.name)
            try:
                answer = pb.ModelInferResponse.FromString(infer(exchange.request, timeout=60))
                right += len(answer.raw_output_contents[0]) == size
            except grpc.RpcError as error:
                errors.append(f"{size} bytes: {error.code()} {error.details()}")
    return right


def run_envoy(seconds: float, seed: int) -> dict[str, Any]:
    """Clients of Envoy, whose connections to the server end by age again and again."""
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="inferd-drain-") as name, ThreadPoolExecutor(4) as clients:
        folder = Path(name)
        options = ("--grpc-max-connection-age=300", "--grpc-max-connection-age-grace=60000")
        server = inferd.start(write(folder / "models", [MODEL]), folder / "log", options=options)
        try:
            with proxies.running(proxies.PROXIES["envoy"], envoy(), folder, (server.port, server.port)) as address:
                end = time.monotonic() + seconds
                asked = [clients.submit(call_through, address, seed + each, end, errors) for each in range(4)]
                right = sum(each.result() for each in asked)
            found = re.search(r"Started Metrics Service at http://(\S+)/metrics", server.log.read_text())
            assert found is not None
            ended = scrape(found[1]).value("inferd_accepted_connections_total")
        finally:
            server.stop()
    return {"right": right, "connections": ended, "lost": errors}
