"""Round trips of one client with one request in flight: TCP and unix socket, tensors in messages and in shared memory.

    nice -n -5 python -m bench.round_trips [--rounds 5] [--seconds 1]

Two servers with one identity model: one sleeps until requests come, the other one polls (--io-busy-poll-us), and so
does its client; these have a core each, because a poller that shares its core waits for its turn. The ways take turns,
round by round; each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import inferd, messages
from bench.figures import measure
from bench.processes import HOST
from bench.repository import Identity, write
from inferd_client.driver import Fixed
from inferd_client.grpc import InferenceServerClient
from inferd_client.pb import grpc_service_pb2 as pb
from inferd_client.utils import shared_memory

SIZES = (64, 600_000)
BUSY_US = 1000
REGION = "round_trips"


@dataclass(frozen=True, slots=True)
class Way:
    """How the client reaches the server, and where the tensors lie."""

    name: str
    unix: bool
    region: bool


WAYS = (
    Way("TCP, tensors in messages", False, False),
    Way("unix socket, tensors in messages", True, False),
    Way("unix socket, tensors in shared memory", True, True),
)


def in_region(size: int) -> bytes:
    """The identity's request with its input at the beginning of the region and its output behind that."""
    request = pb.ModelInferRequest.FromString(messages.identity(size).request)
    del request.raw_input_contents[:]
    output = request.outputs.add(name="OUTPUT0")
    for tensor, offset in ((request.inputs[0], 0), (output, size)):
        tensor.parameters["shared_memory_region"].string_param = REGION
        tensor.parameters["shared_memory_offset"].int64_param = offset
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    return request.SerializeToString()


def workload(way: Way, size: int) -> Fixed:
    """The requests; answers in messages are checked byte by byte."""
    if way.region:
        return Fixed([in_region(size)])
    exchange = messages.identity(size)
    return Fixed([exchange.request], [exchange.response])


def share(servers: list[str], stack: ExitStack) -> None:
    """Make the region, and register it at these addresses."""
    key, size = f"/{REGION}_{os.getpid()}", 2 * max(SIZES)
    stack.callback(
        shared_memory.destroy_shared_memory_region, shared_memory.create_shared_memory_region(REGION, key, size)
    )
    for address in servers:
        with InferenceServerClient(address) as client:
            client.register_system_shared_memory(REGION, key, size)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.round_trips", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    print("| bytes there and back | way | sleeping: p50, us | p99 | CPU | polling: p50, us | p99 | CPU |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = write(folder / "models", [Identity("identity", (("FP32", 1),))])
        servers = []
        cores = sorted(os.sched_getaffinity(0))
        first, others = cores[:1], cores[1:] or cores
        for busy in (0, BUSY_US):
            os.sched_setaffinity(0, others if busy else cores)
            path = folder / f"{busy}.sock"
            options = ["--grpc-address", HOST, "--grpc-address", f"unix://{path}", f"--io-busy-poll-us={busy}"]
            options.append("--allow-client-shm=true")
            server = inferd.start(root, folder / f"log{busy}", options=options)
            stack.callback(server.stop)
            servers.append((server, f"unix:{path}", bool(busy)))
        share([server.address for server, _, _ in servers], stack)
        for size in SIZES:
            found = {}
            for _ in range(given.rounds):
                for way in WAYS:
                    asked = workload(way, size)
                    for server, path, busy in servers:
                        address = path if way.unix else server.address
                        os.sched_setaffinity(0, first if busy else cores)
                        figure = measure(server, asked, (1, 1), given.seconds, address=address, busy_poll=busy)
                        found.setdefault((way, busy), []).append((figure.p50_us, figure.p99_us, figure.cpu_us))
            for way in WAYS:
                rounds = [zip(*found[way, busy], strict=True) for busy in (False, True)]
                cells = [f"{statistics.median(figures):,.0f}" for kind in rounds for figures in kind]
                print(f"| {size:,} | {way.name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
