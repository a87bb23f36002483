"""What a polite client notices while the server is busy with other things.

    nice -n -5 python -m bench.loading                     10 s calm and 10 s busy, three times for each row
    python -m bench.loading --seconds 5 --rounds 1 --only "a first import of torch"

The client sends 64 bytes to an identity model at fixed times on its own connection, a hundred times a second, whether
earlier requests are answered or not, so that a stall counts for each request that it delays. Calm and busy times take
turns; a row has the percentiles of all calm and of all busy requests, in milliseconds. Clients elsewhere have machines
of their own: the polite one runs as soon as it is woken (SCHED_FIFO, for which the program needs the right), and those
who ask the server for something else get what is left of the cores (SCHED_IDLE).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import digits, inferd, messages
from bench.processes import HOST, ServerProcess, free_port
from bench.repository import Identity, write
from inferd_client.driver import Driver, Fixed
from inferd_client.grpc import InferenceServerClient

PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
# A backend of a third party, in the server's process: while one of its models is loaded, a thread runs Python.
BUSY = '''"""busy: a thread runs Python in the server's process for as long as a model is loaded."""

import gc
import threading

from inferd.backends.api import Backend, Instance, Model


def spin(end):
    while not end.is_set():
        sum(range(1000))


def collect(end):
    kept = [[number] for number in range(1_000_000)]
    while not end.is_set():
        gc.collect()
    kept.clear()


class BusyBackend(Backend):
    name = "busy"

    def load(self, source):
        return BusyModel(source.spec)


class BusyModel(Model):
    def __init__(self, spec):
        self.end = threading.Event()
        self.thread = threading.Thread(target=collect if spec.name == "collect" else spin, args=(self.end,))
        self.thread.start()

    def create_instance(self, spec):
        return BusyInstance()

    def close(self):
        self.end.set()
        self.thread.join()


class BusyInstance(Instance):
    def execute(self, batch):
        raise RuntimeError("this model keeps the server busy; it answers no requests")
'''
CONFIG = """backend: "{}"
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
"""
TORCHSCRIPT = 50
METRICS = 500
POLLED = 10_000
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x00"  # of ServerReflectionRequest: list_services, which is empty

EXPLICIT = ("--model-control-mode=explicit", "--load-model=small")


@dataclass(frozen=True, slots=True)
class Served:
    """A server, and the port of its metrics."""

    process: ServerProcess
    metrics: int

    @property
    def address(self) -> str:
        return self.process.address


Work = Callable[[Served, threading.Event], None]
"""Keeps a server busy until the event is set."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of business.

    Attributes:
        name: as printed.
        work: what is done while the server is busy; it may end earlier.
        repository: `models` or another one of `repositories`.
        options: of the server while it is calm.
        busy: of another server, which is busy with these.
        once: it happens once in a server's life, so each time has a server of its own.
    """

    name: str
    work: Work
    repository: str = "models"
    options: tuple[str, ...] = EXPLICIT
    busy: tuple[str, ...] = ()
    once: bool = False


@dataclass(slots=True)
class Times:
    """Round-trip times, in buckets of microseconds."""

    counts: Counter[float] = field(default_factory=Counter)
    most: float = 0.0

    def at(self, share: float) -> float:
        """The time that this share of the requests did not exceed."""
        rest = share * self.counts.total()
        for bucket, count in sorted(self.counts.items()):
            rest -= count
            if rest <= 0:
                return bucket
        return self.most

    def __str__(self) -> str:
        return " | ".join(f"{us / 1000:.2f}" for us in (self.at(0.5), self.at(0.99), self.most))


def repositories(folder: Path) -> None:
    """`models`, with all that is loaded by name; `many` identity models; `polled`, ten thousand of them."""
    root = digits.make(folder / "models")
    write(root, [Identity(name, (("FP32", 1),)) for name in ("small", "identity")])
    for number in range(TORCHSCRIPT):
        shutil.copytree(root / "digits_torchscript", root / f"torchscript{number}")
        config = root / f"torchscript{number}" / "config.pbtxt"
        config.write_text(config.read_text().replace("digits_torchscript", f"torchscript{number}"))
    for name, backend in (("python", "python"), ("spin", "busy"), ("collect", "busy")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(CONFIG.format(backend))
    (root / "python" / "1" / "model.py").write_text(PYTHON)
    (folder / "backends").mkdir()
    (folder / "backends" / "busy.py").write_text(BUSY)
    for name, count in (("many", METRICS), ("polled", POLLED)):
        models = [Identity(f"identity{number}", (("FP32", 1),)) for number in range(count - 1)]
        write(folder / name, [Identity("small", (("FP32", 1),)), *models])


def urgent() -> None:
    """From now on, the calling thread runs as soon as it is woken."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def idle() -> None:
    """From now on, the calling thread runs only where a core has nothing else to do."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def loads(*models: str, once: bool = False) -> Work:
    """Loads and unloads these models in turn."""

    def work(server: Served, end: threading.Event) -> None:
        idle()
        with InferenceServerClient(server.address) as client:
            while not end.is_set():
                for model in models:
                    client.load_model(model)
                for model in models:
                    client.unload_model(model)
                if once:
                    return

    return work


def holds(model: str) -> Work:
    """Has a model loaded."""

    def work(server: Served, end: threading.Event) -> None:
        with InferenceServerClient(server.address) as client:
            client.load_model(model)
            end.wait()
            client.unload_model(model)

    return work


def asks(server: Served, end: threading.Event) -> None:
    """Asks for statistics and by reflection, 500 times a second each."""

    def ask(path: str, message: bytes) -> None:
        idle()
        with Driver(server.address) as driver:
            while not end.is_set():
                driver.run(Fixed([message]), seconds=0.5, rate=500, in_flight=100, path=path)

    other = threading.Thread(target=ask, args=(REFLECTION, LIST_SERVICES))
    other.start()
    ask(STATISTICS, b"")
    other.join()


def scrapes(server: Served, end: threading.Event) -> None:
    """Reads the metrics again and again."""
    idle()
    while not end.is_set():
        with urllib.request.urlopen(f"http://{HOST}:{server.metrics}/metrics") as page:
            page.read()


def nothing(server: Served, end: threading.Event) -> None:  # noqa: ARG001 (it keeps itself busy)
    end.wait()


ROWS = (
    Row("a first import of torch", loads("digits_torchscript", once=True), once=True),
    Row("a first import of ONNX Runtime", loads("digits_onnx", once=True), once=True),
    Row(
        f"loads of {TORCHSCRIPT} TorchScript models", loads(*(f"torchscript{number}" for number in range(TORCHSCRIPT)))
    ),
    Row("loads of an ONNX model", loads("digits_onnx")),
    Row("loads of an identity model", loads("identity")),
    Row("loads of a model.py", loads("python")),
    Row("a thread that runs Python", holds("spin")),
    Row("collections of 10^6 objects", holds("collect")),
    Row("statistics and reflection, 1,000/s", asks),
    Row(f"scrapes of {METRICS} models", scrapes, "many", ("--model-control-mode=none",)),
    Row(
        f"polls of {POLLED:,} models",
        nothing,
        "polled",
        ("--model-control-mode=none",),
        ("--model-control-mode=poll", "--repository-poll-secs=1"),
    ),
)


@contextlib.contextmanager
def serving(folder: Path, row: Row, options: tuple[str, ...]) -> Iterator[Served]:
    """A server, until the block ends."""
    metrics = free_port()
    given = [*options, f"--metrics-port={metrics}", f"--backend-directory={folder / 'backends'}"]
    process = inferd.start(folder / row.repository, folder / "log", options=given, patience=300)
    try:
        yield Served(process, metrics)
    finally:
        process.stop()


def ask_politely(server: Served, seconds: float, rate: float, times: Times) -> None:
    """Add the times of the client's requests.

    Raises:
        RuntimeError: an answer was wrong, or missing.
    """
    exchange = messages.identity(64, "small")
    with Driver(server.address) as driver:
        asked = Fixed([exchange.request], [exchange.response])
        urgent()
        report = driver.run(asked, seconds=seconds, rate=rate, in_flight=1000)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if report.correct != report.requests:
        raise RuntimeError(str(report))
    times.counts.update(dict(report.histogram))
    times.most = max(times.most, report.latency.max)


def keep_busy(server: Served, row: Row, seconds: float, rate: float, times: Times) -> None:
    """Ask politely while the server is busy; add the times."""
    end = threading.Event()
    worker = threading.Thread(target=row.work, args=(server, end))
    worker.start()
    try:
        ask_politely(server, seconds, rate, times)
    finally:
        end.set()
        worker.join()


def measure(folder: Path, row: Row, seconds: float, rate: float, rounds: int) -> tuple[Times, Times]:
    """The client's times, calm and busy."""
    calm, busy = Times(), Times()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(folder, row, row.options))
        for number in range(rounds):
            if row.once and number:
                stack.close()
                server = stack.enter_context(serving(folder, row, row.options))
            ask_politely(server, seconds, rate, calm)
            if row.busy:
                stack.close()
                with serving(folder, row, row.busy) as other:
                    keep_busy(other, row, seconds, rate, busy)
                server = stack.enter_context(serving(folder, row, row.options))
            else:
                keep_busy(server, row, seconds, rate, busy)
    return calm, busy


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.loading", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="calm, and as many busy, in each round")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="ROW")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    print("| beside | calm: p50, ms | p99 | max | busy: p50, ms | p99 | max |\n|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="inferd-loading-") as name:
        folder = Path(name)
        repositories(folder)
        for row in ROWS:
            if given.only is None or row.name in given.only:
                calm, busy = measure(folder, row, given.seconds, given.rate, given.rounds)
                print(f"| {row.name} | {calm} | {busy} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
