"""Hostile clients attack a running server at full speed, while another client measures its service.

    python -m tests.storms.abuse                       every attack, one server each
    python -m tests.storms.abuse --only resets         one of them
    python -m tests.storms.abuse --quick               a tenth of each, to see that it works

`--only neighbours` (neighbours.py) attacks the resources that clients share, and watches a client and the ledger.

What must hold: no call of the measuring client fails and its 99th percentile stays below 50 ms, whatever the attack
does; a reset costs the server at most 6 us; attacks add at most 8 MiB, unread answers at most 64 MiB. The results are
printed as a table; the exit status is 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from bench import inferd
from bench.processes import ServerProcess
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import h2cases
from tests.storms import neighbours

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
PACE = 9_000  # resets a second that the server allows
HELLO = h2cases.PREFACE + h2cases.settings() + h2cases.frame(h2cases.SETTINGS, h2cases.ACK)

ZEROS = '''
import numpy as np
from inferd.backends.api import Backend, Instance, Model


class Zeros(Backend):
    """Answers a small request with 8 MiB."""

    name = "zeros"

    def load(self, source):
        return Loaded()


class Loaded(Model):
    def create_instance(self, spec):
        return Running()


class Running(Instance):
    def execute(self, batch):
        batch.set_output("OUTPUT", np.ones((8 << 20,), np.uint8))
'''
CONFIG = """
backend: "zeros"
input { name: "INPUT" data_type: TYPE_UINT8 dims: [ 1 ] }
output { name: "OUTPUT" data_type: TYPE_UINT8 dims: [ 8388608 ] }
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of the attacks."""

    resets: int = 200_000
    readers: int = 100
    idle: int = 2_000
    seconds: float = 5.0  # of each flood
    patience: float = 15.0  # seconds for which the readers do not read
    calm: float = 5.0  # seconds before the attacks on neighbours
    beside: float = 15.0  # seconds of each of these

    def tenth(self) -> Plan:
        return Plan(
            self.resets // 10, self.readers // 10, self.idle // 10, self.seconds / 10, self.patience / 3, 1.0, 3.0
        )


@dataclass
class Result:
    """The effect of an attack."""

    attack: str
    calls: int
    failed: int
    p99_ms: float
    growth_mib: float  # of the server's resident memory, at its peak
    cpu_us: float | None = None  # of the server for each event of the attack
    note: str = ""
    growth_limit: float = 8.0

    @property
    def holds(self) -> bool:
        return (
            not self.failed
            and self.p99_ms < 50
            and self.growth_mib <= self.growth_limit
            and (self.cpu_us is None or self.cpu_us <= 6)
        )


def infer_request() -> bytes:
    request = pb.ModelInferRequest(model_name="zeros", raw_input_contents=[b"x"])
    request.inputs.add(name="INPUT", datatype="UINT8", shape=[1])
    return request.SerializeToString()


class Probe:
    """A well-behaved client that measures, inside a `with` block."""

    def __init__(self, server: ServerProcess, path: str = "/inference.GRPCInferenceService/ServerLive") -> None:
        self._server, self._path = server, path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.times: list[float] = []
        self.failed = 0
        self.peak = 0

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, self._server.rss())

    def __enter__(self) -> Probe:
        command = [sys.executable, "-m", "tests.storms.abuse", "--probe", self._server.address, self._path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        self.before = self._server.rss()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        said = json.loads(self._process.communicate("stop")[0])
        self.times, self.failed = said["times"], said["failed"]

    def result(self, attack: str, *, note: str = "", limit: float = 8.0) -> Result:
        return Result(
            attack,
            len(self.times),
            self.failed,
            statistics.quantiles(self.times, n=100)[98] * 1e3,
            max(0, self.peak - self.before) / MIB,
            None,
            note,
            limit,
        )


def probe(address: str, path: str) -> None:
    """Call until a byte comes from standard input; print the calls' times."""
    times, failed = [], 0
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(path)
        call(b"", wait_for_ready=True)
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            start = time.perf_counter()
            try:
                call(b"", timeout=10)
            except grpc.RpcError:
                failed += 1
            times.append(time.perf_counter() - start)
    print(json.dumps({"times": times, "failed": failed}))


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def drained(peer: socket.socket) -> bool:
    """Read all received bytes; True if the server has closed the connection."""
    peer.setblocking(False)
    try:
        while True:
            if not peer.recv(1 << 16):
                return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            peer.setblocking(True)


def opened_and_reset(path: str, count: int, start: int) -> bytes:
    block = h2cases.block(pseudo_path=path)
    return b"".join(
        h2cases.headers(stream, payload=block) + h2cases.reset(stream) for stream in range(start, start + 2 * count, 2)
    )


def open_and_reset(server: ServerProcess, path: str, count: int, per_second: int | None) -> str:
    """Open calls and reset them, at a pace that is allowed or at full speed; reconnect after each GOAWAY."""
    sent = connections = 0
    peer: socket.socket | None = None
    begin = time.perf_counter()
    while sent < count:
        if peer is None:
            peer, stream = connect(server), 1
            peer.sendall(HELLO)
            connections += 1
        try:
            peer.sendall(opened_and_reset(path, 200, stream))
            closed = drained(peer)
        except OSError:
            closed = True
        sent, stream = sent + 200, stream + 400
        if closed:
            peer.close()
            peer = None
        if per_second and (ahead := sent / per_second - (time.perf_counter() - begin)) > 0:
            time.sleep(ahead)
    if peer is not None:
        peer.close()
    return f"{sent / (time.perf_counter() - begin) / 1000:.0f} k/s, {connections} connections"


def resets(server: ServerProcess, plan: Plan, path: str, per_second: int | None) -> Result:
    """What other clients notice of resets."""
    with Probe(server) as watched:
        note = open_and_reset(server, path, plan.resets, per_second)
    method = path.rsplit("/", 1)[1]
    return watched.result(f"{plan.resets} resets of {method}, {'paced' if per_second else 'flat out'}", note=note)


def reset_cost(server: ServerProcess, plan: Plan) -> Result:
    """The cost of one reset, without other clients, until all are processed."""
    count = plan.resets // 2
    before, memory = server.cpu_seconds(), server.rss()
    note = open_and_reset(server, INFER, count, PACE)
    cost = (server.cpu_seconds() - before) / count * 1e6
    return Result(f"{count} resets alone", 0, 0, 0.0, max(0, server.rss() - memory) / MIB, cost, note)


def flood(server: ServerProcess, plan: Plan, name: str, data: bytes) -> Result:
    """Send one frame again and again for some seconds; reconnect after each GOAWAY."""
    sent = connections = 0
    with Probe(server) as watched:
        end = time.perf_counter() + plan.seconds
        peer: socket.socket | None = None
        while time.perf_counter() < end:
            if peer is None:
                peer = connect(server)
                peer.sendall(HELLO + h2cases.headers(1, payload=h2cases.block(pseudo_path=INFER)))
                connections += 1
            try:
                peer.sendall(data * 500)
                closed = drained(peer)
            except OSError:
                closed = True
            sent += 500
            if closed:
                peer.close()
                peer = None
    note = f"{sent / plan.seconds / 1000:.0f} k/s, {connections} connections"
    return watched.result(f"{name} flood", note=note)


def slow_readers(server: ServerProcess, plan: Plan) -> Result:
    """Clients that ask for 8 MiB each and read nothing."""
    message = h2cases.headers(1, payload=h2cases.block(pseudo_path=INFER))
    request = infer_request()
    message += h2cases.frame(h2cases.DATA, 1, 1, b"\0" + len(request).to_bytes(4, "big") + request)
    with grpc.insecure_channel(server.address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        channel.unary_unary(INFER)(request)
    peers = []
    with Probe(server) as watched:
        for _ in range(plan.readers):
            peer = connect(server)
            peer.sendall(h2cases.PREFACE + h2cases.settings((4, 2**31 - 1)) + h2cases.window(0, 2**30) + message)
            peers.append(peer)
        time.sleep(plan.patience)
    for peer in peers:
        peer.close()
    return watched.result(f"{plan.readers} clients that do not read 8 MiB", limit=64.0)


def idle(server: ServerProcess, plan: Plan) -> Result:
    """Connections that send the preface and nothing more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, plan.idle + 200), hard))
    count = min(plan.idle, min(hard, plan.idle + 200) - 200)
    peers = []
    with Probe(server) as watched:
        for _ in range(count):
            peer = connect(server)
            peer.sendall(HELLO)
            peers.append(peer)
        time.sleep(3)
    for peer in peers:
        peer.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    size = max(0, watched.peak - watched.before) / count / 1024
    return watched.result(f"{count} idle connections", note=f"{size:.0f} KiB each", limit=count * 24 / 1024)


FLOODS = {
    "PING": h2cases.frame(h2cases.PING, 0, 0, bytes(8)),
    "SETTINGS": h2cases.settings((4, 70_000)),
    "WINDOW_UPDATE": h2cases.window(0, 1),
    "PRIORITY": h2cases.priority(1),
    "empty DATA": h2cases.frame(h2cases.DATA, 0, 1),
    "CONTINUATION": h2cases.frame(h2cases.HEADERS, 0, 3, h2cases.block())
    + h2cases.frame(h2cases.CONTINUATION, 0, 3) * 70,
    "HPACK bomb": h2cases.headers(3, payload=h2cases.bomb(4000, 10_000)),
}


def attacks() -> Iterator[tuple[str, Callable[[ServerProcess, Plan], Result]]]:
    yield "resets", partial(resets, path=INFER, per_second=PACE)
    yield "resets", partial(resets, path=INFER, per_second=None)
    yield "resets", partial(resets, path="/inference.GRPCInferenceService/ServerMetadata", per_second=None)
    yield "resets", reset_cost
    for name, data in FLOODS.items():
        yield "floods", partial(flood, name=name, data=data)
    yield "readers", slow_readers
    yield "idle", idle


def repository(folder: Path) -> tuple[Path, Path]:
    """(model repository, backend directory) with the model of 8 MiB answers."""
    models, backends = folder / "models", folder / "backends"
    (models / "zeros" / "1").mkdir(parents=True)
    (models / "zeros" / "config.pbtxt").write_text(CONFIG)
    backends.mkdir()
    (backends / "zeros.py").write_text(ZEROS)
    return models, backends


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=["resets", "floods", "readers", "idle", "neighbours"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--probe", nargs=2, metavar=("ADDRESS", "PATH"), help="be the measuring client")
    parser.add_argument("--polite", nargs=3, metavar=("ADDRESS", "KIND", "ROOT"), help="be the polite neighbour")
    arguments = parser.parse_args()
    if arguments.polite:
        neighbours.be_polite(*arguments.polite)
        return 0
    if arguments.probe:
        probe(*arguments.probe)
        return 0
    plan = Plan().tenth() if arguments.quick else Plan()
    if arguments.only == "neighbours":
        with tempfile.TemporaryDirectory(prefix="inferd-abuse-") as name:
            return 0 if neighbours.run(Path(name), plan.calm, plan.beside) else 1
    failed = False
    print("| attack | calls | failed | p99 ms | MiB | CPU us each | | holds |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="inferd-abuse-") as name:
        models, backends = repository(Path(name))
        for kind, attack in attacks():
            if arguments.only not in (None, kind):
                continue
            server = inferd.start(models, Path(name) / "log", options=["--backend-directory", str(backends)])
            try:
                r = attack(server, plan)
            finally:
                failed |= server.stop() != 0
            failed |= not r.holds
            cpu = "" if r.cpu_us is None else f"{r.cpu_us:.2f}"
            print(
                f"| {r.attack} | {r.calls} | {r.failed} | {r.p99_ms:.1f} | {r.growth_mib:.1f} | {cpu} | {r.note} | "
                f"{'yes' if r.holds else 'NO'} |",
                flush=True,
            )
        if arguments.only is None:
            print()
            failed |= not neighbours.run(Path(name), plan.calm, plan.beside)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
