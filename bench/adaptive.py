"""What delays of batches cost and gain: no delay, fixed ones and the adaptive one, from few requests to many.

    python -m bench.adaptive                     every load, some minutes
    python -m bench.adaptive --seconds 1         a short look

The model is a stub that takes 2 ms for a batch and 50 us for each of its rows, in batches of at most 64, without using
the CPU. Requests come in an open loop at random times, at 2.5 %, 25 % and 75 % of the rate that full batches could
serve, or in a closed loop. Latencies count from the time at which a request was due. The mean batch and the adaptive
delay's estimates come from ModelStatistics.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench import inferd, messages
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd.server.pb import grpc_service_pb2 as pb
from inferd_client.driver import Driver, Fixed

ROWS, BATCH_US, ROW_US = 64, 2000, 50
CAPACITY = ROWS / (BATCH_US + ROWS * ROW_US) * 1e6  # requests per second in full batches
DELAYS = {"none": 0, "500 us": 500, "2 ms": 2000, "adaptive": -1}
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at random times, or clients that each have one request in flight."""

    share: float = 0.0  # of the capacity
    clients: int = 0

    def __str__(self) -> str:
        return f"{self.share * CAPACITY:,.0f}/s" if self.share else f"{self.clients} clients"


LOADS = (Load(0.025), Load(0.25), Load(0.75), Load(clients=1), Load(clients=8), Load(clients=48))


def model(name: str, delay_us: int) -> Identity:
    """The stub with this delay; -1 for the adaptive one."""
    parameters = {"delay_us": str(BATCH_US), "row_delay_us": str(ROW_US)}
    if delay_us < 0:
        parameters["adaptive_queue_delay"] = "true"
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {max(delay_us, 0)} }}"
    return Identity(name, (("FP32", 1),), max_batch_size=ROWS, batching=batching, parameters=parameters)


def statistics(server: ServerProcess, name: str) -> pb.ModelStatistics:
    """As the server reports them, with the fields that only this server has."""
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(
            STATISTICS, pb.ModelStatisticsRequest.SerializeToString, pb.ModelStatisticsResponse.FromString
        )
        found: pb.ModelStatistics = ask(pb.ModelStatisticsRequest(name=name)).model_stats[0]
        return found


def row(server: ServerProcess, delay: str, name: str, load: Load, seconds: float) -> str:
    """One line of the table; every answer is compared."""
    exchange = messages.identity(64, name)
    workload = Fixed([exchange.request], [exchange.response])
    rate = load.share * CAPACITY
    connections = 8 if rate else 1
    with Driver(server.address, connections=connections) as driver:
        limits = {"in_flight": 200 if rate else load.clients, "rate": rate, "scattered": bool(rate)}
        driver.run(workload, seconds=seconds / 4, **limits)
        before = statistics(server, name)
        report = driver.run(workload, seconds=seconds, **limits)
        after = statistics(server, name)
    if report.correct != report.requests:
        raise RuntimeError(f"wrong answers: {report.wrong}, {report.lost} lost, {report.samples}")
    batches = after.execution_count - before.execution_count
    mean = (after.inference_count - before.inference_count) / batches if batches else 0.0
    latency = report.latency
    cells = [f"{load}", delay, f"{report.rate:,.0f}", f"{latency.mean:,.0f}", f"{latency.p50:,.0f}"]
    cells += [f"{latency.p99:,.0f}", f"{mean:.1f}", learnt(after)]
    return f"| {' | '.join(cells)} |"


def learnt(statistics: pb.ModelStatistics) -> str:
    """The estimates on which the adaptive delay is based."""
    if not statistics.HasField("adaptive_delay"):
        return ""
    found = statistics.adaptive_delay
    return f"{found.fixed_ns / 1e3:,.0f} + {found.row_ns / 1e3:.0f} a row; next in {found.gap_ns / 1e3:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    arguments = parser.parse_args()
    names = {delay: f"delay_{number}" for number, delay in enumerate(DELAYS)}
    models = [model(names[delay], us) for delay, us in DELAYS.items()]
    with tempfile.TemporaryDirectory(prefix="inferd-adaptive-") as folder:
        server = inferd.start(write(Path(folder) / "models", models), Path(folder) / "log")
        try:
            print("| load | delay | answers/s | mean, µs | p50 | p99 | mean batch | learnt, µs |")
            print("|---|---|---:|---:|---:|---:|---:|---|")
            for load in LOADS:
                for delay, name in names.items():
                    print(row(server, delay, name, load, arguments.seconds), flush=True)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
