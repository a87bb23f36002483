"""What a request costs a server under one load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inferd_client.driver import INFER_PATH, Driver, Workload

if TYPE_CHECKING:
    from ssl import SSLContext


class Measured(Protocol):
    """A server, of whichever kind."""

    @property
    def address(self) -> str: ...
    def cpu_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """One model under one load."""

    rate: float  # requests a second
    cpu_us: float  # of the server, a request
    p50_us: float
    p99_us: float


def measure(
    server: Measured,
    workload: Workload,
    load: tuple[int, int],
    seconds: float = 0.0,
    *,
    requests: int = 0,
    address: str = "",
    context: SSLContext | None = None,
    busy_poll: bool = False,
    path: str = INFER_PATH,
) -> Figure:
    """One round: a number of seconds, after a fifth of them as warm-up, or a number of requests.

    Args:
        load: connections, and calls in flight on each.
        address: the one to call, if the server has several.
        context, busy_poll: of the driver.
        path: of the RPC.

    Raises:
        RuntimeError: an answer is wrong or missing.
    """
    connections, in_flight = load
    with Driver(address or server.address, connections=connections, context=context, busy_poll=busy_poll) as driver:
        if seconds:
            driver.run(workload, in_flight=in_flight, seconds=seconds / 5, path=path)
        cpu = server.cpu_seconds()
        report = driver.run(workload, in_flight=in_flight, seconds=seconds, requests=requests, path=path)
        cpu = server.cpu_seconds() - cpu
    if report.correct != report.requests:
        raise RuntimeError(f"wrong answers: {report.wrong}, {report.lost} lost, {report.reset} reset, {report.samples}")
    return Figure(report.rate, cpu / report.answered * 1e6, report.latency.p50, report.latency.p99)
