"""What TLS costs, and what a unix socket saves: one native door, listening three ways at once.

    python -m bench.doors

Each round measures all of a row's ways one after the other, so that they share the machine's good and bad moments; the
best round of each counts. h2load drives TLS, which our driver does not speak; our driver, which compares answers,
drives the sockets.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import inferd, messages
from bench.figures import Figure, best, measure
from bench.peers.drivers import h2load
from bench.processes import ServerProcess
from bench.repository import GATHER, Identity, write
from inferd_client.driver import Fixed

MODEL = Identity("identity", (("FP32", 1),), parameters=GATHER)
SIZES = (64, 4096, 65536, 600_000, 4 << 20)
LOADS = ((1, 1), (1, 32), (8, 8))  # connections, calls in flight on each


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate and its key; P-256, as most gRPC users have."""
    made, key = folder / "server.pem", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def encrypted(folder: Path, rounds: int, requests: int) -> list[str]:
    """A table of plain and encrypted TCP, 64-byte tensor."""
    made, key = certificate(folder)
    repository = write(folder / "models", [MODEL])
    plain = inferd.start(repository, folder / "plain.log")
    exchange = messages.identity(64)
    lines = [
        "| connections x in flight | plain | TLS | server CPU, TLS / plain |",
        "|---|---|---|---|",
    ]
    with ExitStack() as stack:
        stack.callback(plain.stop)
        options = ["--grpc-use-ssl", "--grpc-server-cert", str(made), "--grpc-server-key", str(key)]
        # readiness is asked in plain text, over the unix socket
        options += ["--grpc-address", "127.0.0.1", "--grpc-address", f"unix:{folder}/tls"]
        tls = inferd.start(repository, folder / "tls.log", options=options, address=f"unix:{folder}/tls")
        stack.callback(tls.stop)
        for connections, in_flight in LOADS:
            count = requests if in_flight > 1 else requests // 4

            def loaded(
                server: ServerProcess, connections: int = connections, in_flight: int = in_flight, n: int = count
            ) -> Figure:
                cpu = server.cpu_seconds()
                driven = h2load(
                    server.address,
                    exchange.request,
                    requests=n,
                    connections=connections,
                    in_flight=in_flight,
                    folder=folder,
                    encrypted=server is tls,
                )
                return Figure((server.cpu_seconds() - cpu) / n * 1e6, driven.rate)

            found = best({"plain": partial(loaded, plain), "TLS": partial(loaded, tls)}, rounds)
            cells = [f"{found[way].cpu_us:.1f} µs · {found[way].rate / 1000:.1f} k/s" for way in found]
            # the kernel counts in ticks of 10 ms: too short a round may have cost none
            ratio = f"{found['TLS'].cpu_us / found['plain'].cpu_us:.2f}" if found["plain"].cpu_us else "too short"
            lines.append(f"| {connections} x {in_flight} | {cells[0]} | {cells[1]} | {ratio} |")
    return lines


def sockets(folder: Path, rounds: int, seconds: float) -> list[str]:
    """A table of a unix socket and loopback TCP, by tensor size, with one call and with sixteen in flight."""
    unix = f"unix:{folder}/door"
    options = ["--grpc-address", "127.0.0.1", "--grpc-address", unix]
    server = inferd.start(write(folder / "models", [MODEL]), folder / "sockets.log", options=options)
    lines = [
        "| tensor, connections x in flight | TCP: p50 · rate · server CPU | unix: the same | rate, unix / TCP |",
        "|---|---|---|---|",
    ]
    with ExitStack() as stack:
        stack.callback(server.stop)
        for size in SIZES:
            exchange = messages.identity(size)
            workload = Fixed([exchange.request], [exchange.response])
            for connections, in_flight in ((1, 1), (4, 4)):
                load = (connections, in_flight)
                ways = {"TCP": server.address, "unix": unix}
                found = best(
                    {
                        way: partial(measure, server, workload, load, seconds, address=address)
                        for way, address in ways.items()
                    },
                    rounds,
                )
                cells = [
                    f"{found[way].p50_us:.0f} µs · {found[way].rate:.0f} /s · {found[way].cpu_us:.1f} µs"
                    for way in found
                ]
                ratio = found["unix"].rate / found["TCP"].rate
                lines.append(f"| {size} B, {connections} x {in_flight} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round on a socket")
    parser.add_argument("--requests", type=int, default=40_000, help="of each round of TLS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inferd-doors-") as name:
        for lines in (
            encrypted(Path(name), arguments.rounds, arguments.requests),
            sockets(Path(name), arguments.rounds, arguments.seconds),
        ):
            print(*lines, "", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
