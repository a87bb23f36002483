"""What a request costs a server under one load."""

from __future__ import annotations

from dataclasses import dataclass

from bench.processes import ServerProcess
from inferd_client.driver import Driver, Workload


@dataclass(frozen=True, slots=True)
class Figure:
    """One model under one load."""

    cpu_us: float  # of the server, a request
    p50_us: float


def measure(
    server: ServerProcess,
    workload: Workload,
    load: tuple[int, int],
    seconds: float = 0.0,
    *,
    requests: int = 0,
    address: str = "",
) -> Figure:
    """One round: a number of seconds, after a fifth of them as warm-up, or a number of requests.

    Args:
        load: connections, and calls in flight on each.
        address: the one to call, if the server has several.

    Raises:
        RuntimeError: an answer is wrong or missing.
    """
    connections, in_flight = load
    with Driver(address or server.address, connections=connections) as driver:
        if seconds:
            driver.run(workload, in_flight=in_flight, seconds=seconds / 5)
        cpu = server.cpu_seconds()
        report = driver.run(workload, in_flight=in_flight, seconds=seconds, requests=requests)
        cpu = server.cpu_seconds() - cpu
    if report.correct != report.requests:
        raise RuntimeError(f"wrong answers: {report.wrong}, {report.lost} lost, {report.reset} reset, {report.samples}")
    return Figure(cpu / report.answered * 1e6, report.latency.p50)
