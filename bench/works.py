"""The loads of the benchmark table: requests, servers, and the figures of a round."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from bench import messages, python_models
from bench.messages import Exchange
from bench.peers import GrpcAioEcho, Inferd, InferdGrpcio, InferdPython, Nghttpd, Peer, Triton
from inferd_client.driver import INFER_PATH, Driver, Fixed

COMPARED_BYTES = 4096  # answers up to this size are compared byte by byte
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds and rounds."""

    seconds: float = 2.0
    warm_up_seconds: float = 0.5
    rounds: int = 3
    idle_seconds: float = 10.0


QUICK = Effort(seconds=0.5, warm_up_seconds=0.1, rounds=1, idle_seconds=2.0)


@dataclass(frozen=True, slots=True)
class Measure:
    """One server under one load, in one round."""

    requests: int
    rate: float  # per second
    cpu_us: float  # server CPU per request
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    driver_cpu_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """One server under one load: all its rounds."""

    work: str
    server: str
    connections: int
    in_flight: int
    rounds: list[Measure]

    @property
    def best(self) -> dict[str, float]:
        """The best of the rounds, for each figure by itself."""
        return {
            "rate": max(m.rate for m in self.rounds),
            **{
                name: min(getattr(m, name) for m in self.rounds)
                for name in ("cpu_us", "mean_us", "p50_us", "p90_us", "p99_us", "max_us")
            },
        }


@dataclass(frozen=True, slots=True)
class Work:
    """A load, and its servers."""

    name: str
    title: str
    exchange: Exchange
    connections: int
    in_flight: int
    servers: tuple[type[Peer], ...]


EVERYONE = (Nghttpd, GrpcAioEcho, Triton, Inferd, InferdGrpcio)
PYTHON = (Triton, InferdPython)
ECHOES = (Nghttpd, GrpcAioEcho, Inferd, InferdGrpcio)


def works() -> list[Work]:
    """The loads of the table."""
    small = messages.identity(64)
    return [
        Work("small", "64-byte tensor, 1 connection x 32 in flight", small, 1, 32, EVERYONE),
        Work(
            "shared",
            "the same, each request's input handed back as it arrived, nothing gathered or split",
            messages.identity(64, "shared"),
            1,
            32,
            (Nghttpd, Inferd, InferdGrpcio),
        ),
        Work("single", "64-byte tensor, 1 in flight", small, 1, 1, EVERYONE),
        Work("spread", "64-byte tensor, 8 connections x 8 in flight", small, 8, 8, EVERYONE),
        Work("large_in", "600 kB in, 64 bytes out, 4 x 4", messages.large_in(600_000), 4, 4, ECHOES),
        Work(
            "large_read",
            "600 kB in and gathered, 64 bytes out, 4 x 4",
            messages.large_in(600_000, "large_read"),
            4,
            4,
            (Inferd, InferdGrpcio),
        ),
        Work("python", "the same model.py: 64-byte tensor, 1 x 32", small, 1, 32, PYTHON),
        Work("python_single", "the same model.py: 64-byte tensor, 1 in flight", small, 1, 1, PYTHON),
        Work(
            "python_large", "the same model.py: 600 kB there and back, 4 x 4", messages.identity(600_000), 4, 4, PYTHON
        ),
        Work(
            "python_chain",
            "the same three model.py, each asks the next: 64-byte tensor, 1 x 32",
            messages.identity(64, python_models.CHAIN),
            1,
            32,
            PYTHON,
        ),
        # Without the servers on gRPC's C core: with two such messages in flight they stop answering this driver after a
        # while; which side is at fault is not known.
        Work(
            "large_out", "16 MiB in, 16 MiB out, 1 x 2", messages.identity(16 * MIB, "shared"), 1, 2, (Nghttpd, Inferd)
        ),
    ]


def ask(address: str, request: bytes) -> bytes:
    """One ModelInfer through grpc's own client: the answer's bytes."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        return bytes(channel.unary_unary(INFER_PATH, None, None)(request, timeout=30))


def workload(peer: Peer, exchange: Exchange) -> Fixed:
    """Requests whose small answers are compared with a first call's answer."""
    if not peer.speaks_grpc:
        return Fixed([exchange.request])
    answer = ask(peer.address, exchange.request)
    messages.check_response(answer, exchange.response)
    if len(answer) > COMPARED_BYTES or isinstance(peer, Triton):
        return Fixed([exchange.request])  # Triton's answers do not serialise the same way twice
    return Fixed([exchange.request], [answer])


def measure(peer: Peer, driver: Driver, load: Fixed, in_flight: int, effort: Effort) -> Measure:
    """Warm up, then one measured run.

    Raises:
        RuntimeError: an answer was wrong, or missing.
    """
    driver.run(load, in_flight=in_flight, seconds=effort.warm_up_seconds)
    before = peer.cpu_seconds()
    report = driver.run(load, in_flight=in_flight, seconds=effort.seconds)
    cpu = peer.cpu_seconds() - before
    if report.wrong or report.lost or report.reset or not report.answered:
        raise RuntimeError(f"{peer.name}: {report}")
    return Measure(
        report.requests,
        report.rate,
        cpu / report.requests * 1e6,
        report.latency.mean,
        report.latency.p50,
        report.latency.p90,
        report.latency.p99,
        report.latency.max,
        report.driver_cpu_seconds / report.requests * 1e6,
    )
