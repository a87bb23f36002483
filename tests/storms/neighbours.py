"""Hostile clients beside a polite one: what it notices, and whether the ledger shows the memory of the others.

    python -m tests.storms.abuse --only neighbours

Each attack has a fresh server. The polite client is a process of its own with an address of its own. It makes one call
after the other, for some seconds before the attack (calm) and during it; where the table says "shared", it uses the
attacker's connection. In between, the control, the attacker attacks another server of the same kind: what the polite
client then waits longer is due to the machine, whose cores all of them share. The attacker, and what reads the metrics,
get what the others leave of these (SCHED_IDLE), since elsewhere they would have machines of their own. The table has
the 99th percentiles of these times, and the growth of the server's resident memory and of `inferd_held_bytes` at their
peaks. What must hold: no polite call is lost; its 99th percentile is at most 3 times that of the calm, or 1.5 times
that of the control; and the memory grows by at most 1.3 times the ledger's growth, plus 64 MiB.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import resource
import select
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
from grpc_health.v1 import health_pb2

from bench import inferd
from bench.processes import ServerProcess
from tests.conformance import h2cases
from tests.conformance.client import request
from tests.conformance.raw import Client
from tests.framing import Answer, framed
from tests.front.certificates import Authority
from tests.observe.scraping import scrape

KIB, MIB = 1 << 10, 1 << 20
FACTOR, CONSTANT, SLOWER, BESIDE_CONTROL = 1.3, 64 * MIB, 3.0, 1.5
SILENT = 1500
POLITE = "127.0.0.2"
INFER, STREAM, LIVE = (
    f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer", "ServerLive")
)
WATCH = "/grpc.health.v1.Health/Watch"
WINDOW = 4  # SETTINGS_INITIAL_WINDOW_SIZE

IDENTITY = """
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""
PAIR = """
backend: "identity"
max_batch_size: 0
input [{ name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_UINT8 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_UINT8 dims: [ -1 ] }]
"""
SENDER = (
    IDENTITY.replace("identity", "python")
    + "instance_group { kind: KIND_CPU count: 2 } model_transaction_policy { decoupled: true }"
)
SENDER_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(request.inputs()[0].as_numpy()[0])
            while count and not sender.is_cancelled():
                count -= 1
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros(65536, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@dataclass
class Row:
    """The effect of an attack."""

    attack: str
    calm: list[float]  # seconds of the polite client's calls
    control: list[float]  # while another server is attacked
    during: list[float]
    lost: int
    grown: int
    held: int
    note: str

    @property
    def holds(self) -> bool:
        return (
            not self.lost
            and bool(self.during)
            and percentile(self.during)
            <= max(SLOWER * percentile(self.calm), BESIDE_CONTROL * percentile(self.control))
            and self.grown <= FACTOR * self.held + CONSTANT
        )

    def __str__(self) -> str:
        parts = (
            self.attack,
            len(self.during),
            self.lost,
            *map(shown, (self.calm, self.control, self.during)),
            f"{self.grown / MIB:.0f}",
            f"{self.held / MIB:.0f}",
            self.note,
            "yes" if self.holds else "NO",
        )
        return "| " + " | ".join(map(str, parts)) + " |"


def shown(times: Sequence[float]) -> str:
    return f"{statistics.median(times) * 1e3:.1f} / {percentile(times) * 1e3:.1f}" if times else "-"


def percentile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98] if len(times) > 1 else max(times, default=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Clients


def greeted(client: Client) -> Client:
    """Wait until the server's SETTINGS have come; return the client."""
    client.receive_until(lambda: client.h2.max_outbound_frame_size > 16384)
    return client


def send(client: Client, stream: int, data: bytes, timeout: float = 60.0) -> None:
    """Send all messages of a call, as flow control allows."""
    for at in range(0, len(data), 16384):
        client.receive_until(lambda: client.h2.local_flow_control_window(stream) >= 16384, timeout)
        client.data(stream, data[at : at + 16384], end=at + 16384 >= len(data))


def ask(client: Client, message: bytes, path: str = INFER, **headers: str) -> int:
    stream = client.headers(path, **headers)
    send(client, stream, message)
    return stream


def infer(model: str, elements: int, value: float = 0) -> bytes:
    return request(model, np.full(elements, value, np.float32)).SerializeToString()


def trusting(root: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=root)
    context.set_alpn_protocols(["h2"])
    return context


def encrypted(address: str, root: str) -> Client:
    host, port = address.rsplit(":", 1)
    line = socket.create_connection((host, int(port)), timeout=60, source_address=(POLITE, 0))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Client(trusting(root).wrap_socket(line, server_hostname="localhost"))


def one_call(address: str, kind: str, root: str) -> Callable[[], bool]:
    """Make a call of the polite client; True if it was answered."""
    if kind == "handshake":  # a connection each

        def call() -> bool:
            with encrypted(address, root) as client:
                return client.call(LIVE).status == 0

        return call
    message = {"gzip": framed(gzip.compress(infer("quick", 16 * KIB)), 1), "large": framed(infer("quick", 75_000))}
    message |= {"infer": framed(infer("quick", 16)), "decoupled": framed(infer("sender", 1, 1))}
    message["tls"] = message["infer"]
    headers = {"grpc_encoding": "gzip"} if kind == "gzip" else {}
    path = STREAM if kind == "decoupled" else INFER
    client = greeted(encrypted(address, root) if kind == "tls" else Client(address, source=POLITE))

    def infer_once() -> bool:
        stream = ask(client, message[kind], path, **headers)
        return client.answer(stream).status == 0

    return infer_once


def be_polite(address: str, kind: str, root: str = "") -> None:
    """Call until a byte comes from standard input; print each call's begin and seconds, and how many were lost."""
    times, lost, call = [], 0, one_call(address, kind, root)
    print("ready" if call() else "not served", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        begin = time.monotonic()
        try:
            lost += not call()
        except (OSError, TimeoutError):
            lost += 1
        times.append((begin, time.monotonic() - begin))
    print(json.dumps({"times": times, "lost": lost}))


# ---------------------------------------------------------------------------------------------------------------------
# Attacks: each lasts until `end` on the monotonic clock


@dataclass
class Attacked:
    """A server under attack."""

    server: ServerProcess
    root: str
    end: float
    kept: list[Client] = field(default_factory=list)  # open until the attack is over
    times: list[float] = field(default_factory=list)  # of the polite calls on the attacker's own connection

    @property
    def address(self) -> str:
        return self.server.address

    def goes_on(self) -> bool:
        return time.monotonic() < self.end

    def rest(self) -> None:
        time.sleep(max(0, self.end - time.monotonic()))


def empty_messages(attacked: Attacked) -> str:
    count = 0
    while attacked.goes_on():
        with contextlib.suppress(OSError), Client(attacked.address, settings={WINDOW: 0}) as client:
            greeted(client)
            stream = client.headers(STREAM)
            answer = client.answers[stream]
            while attacked.goes_on() and answer.reset is None and not answer.ended and not client.closed:
                if client.h2.local_flow_control_window(stream) >= 50 * KIB:
                    client.data(stream, bytes(5) * (10 * KIB))
                    count += 10 * KIB
                with contextlib.suppress(TimeoutError):
                    client.receive_until(lambda a=answer: a.reset is not None, 0.01)
    return f"{count} messages"


def pinned_slices(attacked: Attacked) -> str:
    large, small = np.zeros(2 * MIB, np.uint8), np.zeros(64 * KIB, np.uint8)
    message = framed(request("pair", large, small, outputs=["OUTPUT1"]).SerializeToString())
    count = 0
    while attacked.goes_on() and count < 400:
        if count % 100 == 0:
            attacked.kept.append(greeted(Client(attacked.address, settings={WINDOW: 0})))
        client = attacked.kept[-1]
        stream = ask(client, message)
        client.receive_until(lambda c=client, s=stream: c.answers[s].headers or c.answers[s].reset is not None)
        count += 1
    attacked.rest()
    return f"{count} answers of 64 KiB, out of 2 MiB each"


def silent_connections(attacked: Attacked) -> str:
    """Open as many connections as the process may; reopen those that the server closed, some hundreds a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, SILENT + 200), hard))
    host, port = attacked.address.rsplit(":", 1)
    lines: list[socket.socket] = []
    count = 0
    while attacked.goes_on():
        with contextlib.suppress(OSError):
            lines.append(socket.create_connection((host, int(port)), timeout=5))
            count += 1
        if len(lines) >= min(SILENT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200):
            lines.pop(0).close()
            time.sleep(0.002)
    for line in lines:
        line.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return f"{count} connections, {len(lines)} at a time"


@cache
def bomb() -> bytes:
    return framed(gzip.compress(bytes(64 * MIB), 9), 1)


def bombs(attacked: Attacked) -> str:
    message = bomb()
    count = 0
    while attacked.goes_on():
        with contextlib.suppress(OSError), greeted(Client(attacked.address)) as client:  # it may wait longer than that
            for _ in range(64):
                send(client, client.headers(INFER, grpc_encoding="gzip"), message, 5)
                count += 1
                if not attacked.goes_on():
                    break
            client.receive_until(lambda c=client: all(a.ended for a in c.answers.values()) or not attacked.goes_on(), 1)
    return f"{count} of 64 MiB"


def slow_user(attacked: Attacked, calm: float) -> str:
    """After a calm time, two users of the connection leave 3 MiB each unread."""
    proxy = greeted(Client(attacked.address, acknowledge_data=False, source=POLITE))
    attacked.kept.append(proxy)
    proxy.h2.increment_flow_control_window(1 << 30)
    small, large = framed(infer("quick", 16)), framed(infer("quick", 3 * MIB // 4))
    begun = time.monotonic()
    stalled = False
    while attacked.goes_on():
        if not stalled and time.monotonic() > begun + calm:
            stalled = True
            unread = [proxy.answers[ask(proxy, large)] for _ in range(2)]
            proxy.receive_until(lambda a=unread: all(answer.headers for answer in a))
        begin = time.monotonic()
        status = proxy.answer(ask(proxy, small)).status
        attacked.times.append((time.monotonic() - begin) if status == 0 else float("inf"))
        if not stalled:
            attacked.times[-1] *= -1  # calm
    return "shared"


def python_calls(attacked: Attacked, path: str, message: bytes = b"") -> str:
    count = 0
    client = greeted(Client(attacked.address))
    attacked.kept.append(client)
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers"}
    while attacked.goes_on():
        for _ in range(500):
            stream = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream, [*fields.items(), ("content-type", "application/grpc")])
            client.h2.send_data(stream, framed(message), end_stream=True)
            client.answers[stream] = Answer()
        client.flush()
        count += 500
        client.receive_until(lambda: all(answer.ended for answer in client.answers.values()), 30)
        client.answers.clear()
    return f"{count} calls"


def unread_streams(attacked: Attacked) -> str:
    count = 0
    message = framed(infer("sender", 1, 1_000_000))
    while attacked.goes_on():
        with Client(attacked.address, acknowledge_data=False) as client:
            greeted(client).h2.increment_flow_control_window(MIB)
            streams = [ask(client, message, STREAM) for _ in range(2)]
            count += 2
            with contextlib.suppress(TimeoutError):
                client.receive_until(lambda c=client, s=streams: any(c.answers[n].ended for n in s), 5)
    return f"{count} streams"


def long_names(attacked: Attacked) -> str:
    watch = health_pb2.HealthCheckRequest(service="nobody").SerializeToString()
    watch += b"\x7a\xb0\xc9\x0c" + bytes(206_000)  # a field that the message does not have
    parameters = {"sequence_id": "s" * MIB, "sequence_start": True}
    sequence = request("sequence", np.zeros(1, np.float32), parameters=parameters).SerializeToString()
    while attacked.goes_on() and len(attacked.kept) < 485:
        client = greeted(Client(attacked.address))
        attacked.kept.append(client)
        ask(client, framed(watch), WATCH)
        client.answer(ask(client, framed(sequence)))
    attacked.rest()
    return f"{len(attacked.kept)} Watches of 206 kB, as many ids of 1 MiB"


def tiny_records(attacked: Attacked) -> str:
    """Frames of an unknown type, with a record of TLS for each byte."""
    host, port = attacked.address.rsplit(":", 1)
    clients = [Records(host, int(port), attacked.root) for _ in range(8)]
    count = 0
    while attacked.goes_on():
        for client in clients:
            count += client.send(UNKNOWN * 200)
    for client in clients:
        client.line.close()
    return f"{count} records of a byte"


UNKNOWN = h2cases.frame(0x42, 0, 0, bytes(8))


class Records:
    """A connection with TLS that says where records begin and end."""

    def __init__(self, host: str, port: int, root: str) -> None:
        self.line = socket.create_connection((host, port), timeout=60)
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting(root).wrap_bio(self._coming, self._going, server_hostname="localhost")
        while not self._has_shaken():
            self._coming.write(self.line.recv(1 << 16))
        self._tls.write(h2cases.PREFACE + h2cases.settings())

    def _has_shaken(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self.line.sendall(self._going.read())
        return True

    def send(self, data: bytes) -> int:
        """A record for each byte; their number."""
        for at in range(len(data)):
            self._tls.write(data[at : at + 1])
        self.line.sendall(self._going.read())
        return len(data)


def handshakes(attacked: Attacked) -> str:
    """Connect, shake hands, and leave, four at a time."""
    host, port = attacked.address.rsplit(":", 1)
    context = trusting(attacked.root)

    def work() -> int:
        count = 0
        while attacked.goes_on():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=60) as line:
                context.wrap_socket(line, server_hostname="localhost").close()
                count += 1
        return count

    with ThreadPoolExecutor(4) as threads:
        return f"{sum(each.result() for each in [threads.submit(work) for _ in range(4)])} handshakes"


@dataclass(frozen=True)
class Attack:
    """An attack, and its polite client."""

    name: str
    run: Callable[[Attacked], str]
    polite: str = "infer"  # a kind of `one_call`; "": on the attacker's connection
    options: tuple[str, ...] = ("--max-held-bytes=100000000",)


def attacks(calm: float, tls: tuple[str, ...]) -> Iterator[Attack]:
    yield Attack("empty messages of a stream that is not read", empty_messages)
    yield Attack("small answers out of large blocks", pinned_slices)
    yield Attack("silent connections to a TLS port of 100 connections", silent_connections, "handshake", tls)
    yield Attack("handshakes of TLS, four at a time", handshakes, "tls", tls)
    yield Attack("records of TLS with a byte each", tiny_records, "tls", tls)
    yield Attack("gzip bombs beside gzip", bombs, "gzip", ())
    yield Attack("two users of a connection that do not read", partial(slow_user, calm=calm), "")
    yield Attack("ServerLive, 500 in flight", partial(python_calls, path=LIVE))
    statistics_path = LIVE.replace("ServerLive", "ModelStatistics")
    yield Attack("ModelStatistics, 500 in flight", partial(python_calls, path=statistics_path))
    yield Attack("decoupled streams that are not read", unread_streams, "decoupled")
    yield Attack("long Watches and ids of sequences", long_names, "large")


# ---------------------------------------------------------------------------------------------------------------------


def repository(folder: Path) -> Path:
    sequence = IDENTITY + "sequence_batching { max_sequence_idle_microseconds: 60000000 }"
    for name, config in {"quick": IDENTITY, "pair": PAIR, "sender": SENDER, "sequence": sequence}.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "sender" / "1" / "model.py").write_text(SENDER_MODEL)
    return folder


class Memory:
    """Both figures at their peaks, while the `with` block runs."""

    def __init__(self, server: ServerProcess) -> None:
        found = re.search(r"http://(\S+)/metrics", server.log.read_text(errors="replace"))
        assert found, server.log_end()
        self._server, self._metrics = server, found[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.grown = self.held = 0
        self._before = server.rss()

    def _watch(self) -> None:
        stand_back()
        while not self._stop.wait(0.1):
            page = scrape(self._metrics)
            shown = int(sum(size for (name, _), size in page.samples.items() if name == "inferd_held_bytes"))
            self.held = max(self.held, shown)
            self.grown = max(self.grown, self._server.rss() - self._before)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def stand_back() -> None:
    """Have this thread, and those that it starts, leave the processors to others."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run_attack(attack: Attack, attacked: Attacked) -> str:
    """Run it on a thread that stands back."""

    def run() -> str:
        stand_back()
        return attack.run(attacked)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def measure(attack: Attack, server: ServerProcess, other: ServerProcess, root: str, calm: float, seconds: float) -> Row:
    if not attack.polite:
        attacked = Attacked(server, root, time.monotonic() + calm + seconds)
        with Memory(server) as memory:
            note = run_attack(attack, attacked)
        leave(attacked)
        during = [each for each in attacked.times if 0 <= each < float("inf")]
        lost = attacked.times.count(float("inf"))
        quiet = [-each for each in attacked.times if each < 0]
        return Row(attack.name, quiet, [], during, lost, memory.grown, memory.held, note)
    command = [sys.executable, "-m", "tests.storms.abuse", "--polite", server.address, attack.polite, root]
    polite = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if polite.stdout is None or (said := polite.stdout.readline().strip()) != "ready":
        raise RuntimeError(f"the polite client is {said}")
    time.sleep(calm)
    begin_control = time.monotonic()
    control = Attacked(other, root, begin_control + seconds)
    with Memory(other):
        run_attack(attack, control)
    leave(control)
    end_control = time.monotonic()
    time.sleep(1)  # the other server lets go of it
    begin = time.monotonic()
    attacked = Attacked(server, root, begin + seconds)
    with Memory(server) as memory:
        note = run_attack(attack, attacked)
    end = time.monotonic()
    told = json.loads(polite.communicate("stop")[0])
    leave(attacked)

    def between(start: float, stop: float) -> list[float]:
        return [took for at, took in told["times"] if start <= at + took and at < stop]

    before = [took for at, took in told["times"] if at + took < begin_control]
    beside = between(begin_control, end_control)
    return Row(attack.name, before, beside, between(begin, end), told["lost"], memory.grown, memory.held, note)


def leave(attacked: Attacked) -> None:
    for client in attacked.kept:
        client.socket.close()


def run(folder: Path, calm: float, seconds: float) -> bool:
    """Run every attack and print a table; True if all holds."""
    models = repository(folder / "neighbours")
    bomb()  # this takes a while
    authority = Authority(folder / "authority")
    pair = authority.issue("server", "DNS:localhost")
    tls = ("--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}")
    plain = f"unix:{folder}/s"
    tls += ("--grpc-max-connections=100", "--grpc-handshake-timeout=60000")
    tls += ("--grpc-address=127.0.0.1", f"--grpc-address={plain}")
    print("| attack | polite calls | lost | calm p50 / p99 ms | control | during | RSS MiB | ledger MiB | | holds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    holds = True
    for attack in attacks(calm, tls):
        encrypts = attack.options == tls
        server = inferd.start(models, folder / "log", options=attack.options, address=plain if encrypts else "")
        try:
            address = f"{plain}2" if encrypts else ""
            other = inferd.start(
                models,
                folder / "log2",
                options=[o.replace(plain, address) if address else o for o in attack.options],
                address=address,
            )
            try:
                row = measure(attack, server, other, str(authority.root), calm, seconds)
            finally:
                holds &= other.stop() == 0
        finally:
            holds &= server.stop() == 0
        holds &= row.holds
        print(row, flush=True)
    return holds
