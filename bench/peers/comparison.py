"""The rows of the comparison: each has a load, the servers that get it, and a function that measures one round.

A *way* is a server and one of its models. All ways of a row take turns within each round.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import messages
from bench.overload import Probe
from bench.peers import models
from bench.peers.base import Peer
from bench.peers.drivers import run_h2load
from bench.peers.grpc_aio import GrpcAioEcho
from bench.peers.inferd import InferdShared, InferdSharedGrpcio
from bench.peers.nghttpd import Nghttpd
from bench.peers.others import BentoML, HttpServer, KServe, LitServe, MLServer, Mosec, RayServe
from bench.peers.triton import TritonShared
from bench.works import MIB, ask
from inferd_client.driver import INFER_PATH, Driver, Fixed
from inferd_client.driver.report import Report
from inferd_client.grpc import InferenceServerClient

STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
OK, UNAVAILABLE = 0, 14
SATURATED = 0.9  # a server that answers a smaller part of the offered rate does not keep up


@dataclass(frozen=True, slots=True)
class Way:
    """A server and one of its models."""

    name: str
    server: type[Peer]
    model: str = "identity"
    unix: bool = False

    def address(self, peer: Peer) -> str:
        return peer.unix if self.unix and isinstance(peer, InferdShared) else peer.address


NATIVE = Way("inferd, native", InferdShared)
INFERD_C = Way("inferd, backend in C", InferdShared, "echo")
INFERD_PYTHON = Way("inferd, model.py", InferdShared, "python")
TRITON_C = Way("Triton, backend in C", TritonShared, "echo")
TRITON_PYTHON = Way("Triton, model.py", TritonShared, "python")
INFERD_ONNX = Way("inferd, ONNX", InferdShared, "digits_onnx")
INFERD_TORCHSCRIPT = Way("inferd, TorchScript", InferdShared, "digits_torchscript")
INFERD_DIGITS = Way("inferd, ONNX in a model.py", InferdShared, "digits_python")
TRITON_DIGITS = Way("Triton, ONNX in a model.py", TritonShared, "digits_python")
ORIENTATION = (Way("mosec", Mosec), Way("LitServe", LitServe), Way("BentoML", BentoML))
WAYS = (
    Way("nghttpd", Nghttpd),
    NATIVE,
    Way("inferd, native, unix socket", InferdShared, unix=True),
    Way("inferd, native, grpcio door", InferdSharedGrpcio),
    INFERD_C,
    TRITON_C,
    INFERD_PYTHON,
    TRITON_PYTHON,
    Way("grpc.aio", GrpcAioEcho),
    Way("MLServer", MLServer),
    Way("KServe SDK", KServe),
    Way("Ray Serve", RayServe),
)
PAIRS = (NATIVE, INFERD_C, TRITON_C, INFERD_PYTHON, TRITON_PYTHON)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that each way gets, and how they come."""

    key: str
    title: str
    ways: Sequence[Way]
    connections: int
    in_flight: int
    size: int = 64  # bytes of the tensor
    rate: float = 0.0  # requests a second, at random times (an open loop); 0: a closed loop
    path: str = INFER_PATH
    model: str = ""  # instead of the way's
    answers: int = 1  # responses to each request


def closed_loops() -> list[Load]:
    small = [
        Load(
            f"small_{level}", f"64 bytes, {level} in flight", (*WAYS, *ORIENTATION), max(1, level // 32), min(level, 32)
        )
        for level in (1, 8, 32, 128)
    ]
    return [
        *small,
        Load("large", "600 kB there and back, 4 connections x 4", WAYS, 4, 4, size=600_000),
        Load("huge", "16 MiB there and back, 1 x 2", PAIRS, 1, 2, size=16 * MIB),
        Load("busy", "2 to 3 ms of one core an execution, batches of at most 8; 32 in flight",
             (INFERD_C, TRITON_C), 4, 8, model="busy"),
        Load("waiting", "a model.py that waits 5 ms for each batch, as for a GPU; 128 in flight",
             (INFERD_PYTHON, TRITON_PYTHON), 4, 32, model="waiting"),
        Load("chain", "an ensemble of three steps, each a backend in C; 64 bytes, 32 in flight",
             (INFERD_C, TRITON_C), 4, 8, model="chain"),
        Load("cnn", "the demo's CNN, one image a request; 32 in flight",
             (INFERD_ONNX, INFERD_TORCHSCRIPT, INFERD_DIGITS, TRITON_DIGITS), 4, 8),
        Load("stream", f"streams of {models.RESPONSES:,} responses of 64 bytes from a backend in C, 4 at a time",
             (INFERD_C, TRITON_C), 4, 1, path=STREAM_PATH, model="stream", answers=models.RESPONSES),
    ]  # fmt: skip


RATES = (1_000, 2_000, 5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 240_000)


@dataclass(frozen=True, slots=True)
class Round:
    """One way under one load. Times in microseconds; None where the driver does not tell."""

    rate: float  # responses a second
    cpu_us: float  # CPU time of the server's processes for each response
    p50_us: float | None
    p99_us: float | None
    kept_up: bool = True

    @staticmethod
    def of(report: Report, cpu: float, load: Load) -> Round:
        answers = report.answered * load.answers
        return Round(
            answers / report.seconds,
            cpu / answers * 1e6,
            report.latency.p50,
            report.latency.p99,
            not load.rate or report.rate >= SATURATED * load.rate,
        )


def exchange_of(load: Load, way: Way) -> messages.Exchange:
    if load.key == "cnn":
        return messages.Exchange(models.image(way.model), b"")
    return messages.identity(load.size, load.model or way.model)


def check(peer: Peer, way: Way, load: Load) -> None:
    """Ask once with grpc's own client, and compare the response.

    Raises:
        ValueError: the response is not the expected one.
    """
    if peer.speaks_grpc and load.answers == 1:
        exchange = exchange_of(load, way)
        if load.key == "cnn":
            with InferenceServerClient(peer.address) as client:
                client.load_model(way.model, client_timeout=60)
        answer = ask(peer.address, exchange.request)
        if exchange.response:
            messages.check_response(answer, exchange.response)
        else:
            models.check_digit(answer)


def measure(peer: Peer, way: Way, load: Load, seconds: float) -> Round:
    """Measure one round.

    Raises:
        RuntimeError: a response was wrong, or missing.
        AbsentError: the load's driver is not there.
    """
    if isinstance(peer, HttpServer):
        return measure_http(peer, load, seconds)
    workload = Fixed([exchange_of(load, way).request])
    with Driver(way.address(peer), connections=load.connections) as driver:
        driver.run(workload, in_flight=load.in_flight, seconds=seconds / 4, path=load.path)
        cpu = peer.cpu_seconds()
        report = driver.run(
            workload, in_flight=load.in_flight if not load.rate else 1000, seconds=seconds, rate=load.rate,
            scattered=bool(load.rate), path=load.path,
        )  # fmt: skip
        cpu = peer.cpu_seconds() - cpu
    if report.wrong or report.lost or report.reset or not report.answered:
        raise RuntimeError(f"{way.name}: {report.samples or report}")
    return Round.of(report, cpu, load)


def measure_http(peer: HttpServer, load: Load, seconds: float) -> Round:
    """Measure one round over HTTP/1.1, with a connection for each request in flight.

    Raises:
        RuntimeError: a request failed.
        AbsentError: h2load is not installed.
    """
    body = peer.folder / "body"
    body.write_bytes(peer.body)
    clients = load.connections * load.in_flight
    duration = max(1, round(seconds))  # in whole seconds only
    cpu = peer.cpu_seconds()
    text = run_h2load(
        "--h1",
        f"-c{clients}",
        f"-D{duration}",
        "--warm-up-time=1s",
        *("-d", str(body), "-H", f"content-type: {peer.media_type}", f"http://{peer.address}{peer.path}"),
    )
    cpu = peer.cpu_seconds() - cpu
    found = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", text)
    codes = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", text)
    if found is None or codes is None or codes.group(2, 3, 4) != ("0", "0", "0"):
        raise RuntimeError(f"{peer.name}: {text[-500:]}")
    rate = float(found[1])
    return Round(rate, cpu / (rate * (duration + 1)) * 1e6, None, None)  # the CPU time includes the second of warm-up


# ---------------------------------------------------------------------------------------------------------------------
# Overload


def overload(peer: Peer, seconds: float) -> dict[str, Any]:
    """Goodput of `busy`, whose queue is limited, at its capacity, and at 2 and 5 times that."""
    exchange = messages.identity(64, "busy")
    with Driver(peer.address, connections=8) as driver:
        driver.run(Fixed([exchange.request]), in_flight=4, seconds=seconds / 4)
        capacity = driver.run(Fixed([exchange.request]), in_flight=4, seconds=seconds).rate
    found: dict[str, Any] = {"capacity": capacity}
    for factor in (2, 5):
        with Probe(peer.address, exchange.request) as probe, Driver(peer.address, connections=8) as driver:
            report = driver.run(
                Fixed([exchange.request]), in_flight=1000, seconds=2 * seconds, rate=factor * capacity, scattered=True
            )
        refused = {str(status): calls for status, calls in report.statuses.items() if status != OK}
        found[str(factor)] = {
            "goodput": report.statuses.get(OK, 0) / report.seconds,
            "refused": refused,
            "lost": report.lost + report.reset,
            "accepted_p99_ms": probe.p99(OK),
        }
    return found


# ---------------------------------------------------------------------------------------------------------------------
# While models load


def while_loading(peer: Peer, way: Way, seconds: float) -> dict[str, dict[str, float]]:
    """Times of 500 small requests a second, calm and while an operator loads and unloads a model.py without pause."""
    exchange = exchange_of(Load("", "", (), 1, 1), way)
    found: dict[str, dict[str, float]] = {}
    for state in ("calm", "loading"):
        stop = threading.Event()
        loads = 0

        def operate(stop: threading.Event = stop) -> None:
            nonlocal loads
            with InferenceServerClient(peer.address) as client:
                while not stop.is_set():
                    client.unload_model("waiting")
                    client.load_model("waiting")
                    loads += 1

        operator = threading.Thread(target=operate)
        if state == "loading":
            operator.start()
        with Driver(peer.address) as driver:
            report = driver.run(
                Fixed([exchange.request]), in_flight=1000, seconds=2 * seconds, rate=500, scattered=True
            )
        stop.set()
        if state == "loading":
            operator.join()
        times = asdict(report.latency)
        found[state] = {key: times[key] for key in ("p50", "p99", "p999", "max")} | {"loads": loads}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Start and memory


WORKERS = ("worker/__main__.py", "triton_python_backend_stub")
"""Parts of command lines: a process with one of them runs a `model.py`."""


def memory_of_a_model(peer: Peer) -> float | None:
    """Private MiB of the process of the smallest `model.py`; None where there is none."""
    found = [
        process.memory_full_info().uss / MIB
        for process in peer.server.processes()
        if any(worker in argument for argument in process.cmdline() for worker in WORKERS)
    ]
    return min(found, default=None)


def first_response(way: Way, folder: Path) -> dict[str, float | None]:
    """Seconds from the start of the process to the first right response; memory after it, of the server and a model."""
    load = Load("", "", (), 1, 1)
    peer = way.server(messages.identity(64), Path(tempfile.mkdtemp(dir=folder)))
    models.demo()
    begun = time.monotonic()
    with peer:
        while True:
            try:
                check(peer, way, load)
                break
            except Exception:
                if time.monotonic() - begun > 120:
                    raise
                time.sleep(0.02)
        seconds = time.monotonic() - begun
        return {"seconds": seconds, "mib": peer.server.rss() / MIB, "model_mib": memory_of_a_model(peer)}
