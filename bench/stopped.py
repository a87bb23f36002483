"""How soon the server drops stopped clients (SIGSTOP): their kernel still acknowledges data, but pings stay unanswered.

    python -m bench.stopped

What must hold: the server drops each client within keepalive time + timeout + 1 s. Clients are stopped at moments
spread over the keepalive time; the exit status is 0 when it holds on both doors.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench import inferd
from bench.processes import ServerProcess
from bench.repository import Identity, write

MODEL = Identity("identity", (("FP32", 1),))
CLIENT = """
import sys, time, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
    print(channel, flush=True)
    time.sleep(600)
"""


def peers(server: ServerProcess) -> set[int]:
    """The ports of the clients that are connected."""
    found = psutil.Process(server.pid).net_connections("tcp")
    return {each.raddr.port for each in found if each.status == psutil.CONN_ESTABLISHED and each.raddr}


def stopped(server: ServerProcess, clients: int, spread: float, patience: float) -> list[float]:
    """Seconds from the SIGSTOP of each client until its connection is gone."""
    running: list[subprocess.Popen[str]] = []
    ports: list[int] = []
    at: list[float] = []
    taken: list[float] = []
    try:
        for _ in range(clients):
            client = subprocess.Popen([sys.executable, "-c", CLIENT, server.address], stdout=subprocess.PIPE, text=True)
            running.append(client)
            assert client.stdout is not None
            client.stdout.readline()
            (port,) = peers(server) - set(ports)
            ports.append(port)
        for client in running:
            os.kill(client.pid, signal.SIGSTOP)
            at.append(time.monotonic())
            time.sleep(spread / clients)
        waiting = dict(zip(ports, at, strict=True))
        while waiting and time.monotonic() < at[-1] + patience:
            connected = peers(server)
            taken += [time.monotonic() - waiting.pop(port) for port in set(waiting) - connected]
            time.sleep(0.01)
        return taken + [patience] * len(waiting)
    finally:
        for client in running:
            client.kill()
            client.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="of keepalive time; the timeout is half of it")
    arguments = parser.parse_args()
    time_ms, timeout_ms = round(arguments.seconds * 1000), round(arguments.seconds * 500)
    limit = (time_ms + timeout_ms) / 1000 + 1
    holds = True
    print("| door | clients | soonest | median | latest | limit | holds |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="inferd-stopped-") as name:
        models = write(Path(name) / "models", [MODEL])
        options = [f"--grpc-keepalive-time={time_ms}", f"--grpc-keepalive-timeout={timeout_ms}"]
        options += ["--grpc-http2-max-pings-without-data=0"]
        for door in inferd.DOORS:
            server = inferd.start(models, Path(name) / "log", door=door, options=options)
            try:
                taken = stopped(server, arguments.clients, arguments.seconds, 3 * limit)
            finally:
                server.stop()
            fine = max(taken) <= limit
            holds = holds and fine
            figures = f"{min(taken):.2f} s | {statistics.median(taken):.2f} s | {max(taken):.2f} s | {limit:.1f} s"
            print(f"| {door} | {len(taken)} | {figures} | {'yes' if fine else 'NO'} |", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
