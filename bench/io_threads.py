"""What TLS and a second I/O thread cost and give.

    nice -n -5 python -m bench.io_threads [--rounds 5] [--seconds 2]

Two servers, with --io-threads 1 and 2, each with a plain address and one with TLS (TLS 1.3, AES-128-GCM, ECDSA). The
driver has the first core for itself, so that it disturbs servers of one and of two threads alike, and loads one after
the other, round by round. CPU is the median of the rounds, and the rate is that of the best round.
"""

from __future__ import annotations

import argparse
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import inferd, messages
from bench.figures import measure
from bench.processes import HOST, free_port
from bench.repository import Identity, write
from inferd_client.driver import Fixed

LOADS = (
    ("64 bytes, 8 x 8", 64, 8, 8),
    ("64 bytes, 1 in flight", 64, 1, 1),
    ("600 kB there and back, 4 x 4", 600_000, 4, 4),
)
THREADS = (1, 2)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate of this machine, and its key."""
    made, key = folder / "server.pem", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(made), "-subj", "/CN=bench", "-addext", f"subjectAltName=IP:{HOST}"]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.io_threads", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    print("| load | I/O threads | | CPU, us a request | requests/s |\n|---|---:|---|---:|---:|")
    first, *others = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = write(folder / "models", [Identity("identity", (("FP32", 1),))])
        made, key = certificate(folder)
        context = ssl.create_default_context(cafile=made)
        context.set_alpn_protocols(["h2"])
        places = []
        os.sched_setaffinity(0, others or [first])  # of the servers, which inherit it
        for threads in THREADS:
            port = free_port()
            options = [f"--io-threads={threads}", f"--grpc-server-cert={made}", f"--grpc-server-key={key}"]
            options += ["--grpc-address", HOST, "--grpc-address", f"{HOST}:{port},tls=on"]
            server = inferd.start(root, folder / f"log{threads}", options=options)
            stack.callback(server.stop)
            places += [
                (server, threads, "plain", server.address, None),
                (server, threads, "TLS", f"{HOST}:{port}", context),
            ]
        os.sched_setaffinity(0, [first])
        for title, size, connections, in_flight in LOADS:
            exchange = messages.identity(size)
            asked = Fixed([exchange.request], [exchange.response])
            found = {place: [] for place in range(len(places))}
            for _ in range(given.rounds):
                for number, (server, _, _, address, tls) in enumerate(places):
                    figure = measure(
                        server, asked, (connections, in_flight), given.seconds, address=address, context=tls
                    )
                    found[number].append(figure)
            for number, (_, threads, kind, _, _) in enumerate(places):
                cpu = statistics.median(figure.cpu_us for figure in found[number])
                rate = max(figure.rate for figure in found[number])
                print(f"| {title} | {threads} | {kind} | {cpu:.2f} | {rate:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
