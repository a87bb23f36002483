"""Tensors in shared memory against the same tensors on the wire, over one unix socket.

    python -m bench.shared_memory

Each round measures all ways of a table one after the other, so that they share the machine's good and bad moments; the
best round of each counts. Every answer is compared; of tensors in a region, what lies there afterwards is, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from bench import inferd, messages
from bench.figures import Figure, best, measure
from bench.messages import Exchange
from bench.repository import GATHER, Identity, write
from inferd_client.driver import Fixed
from server.pb import grpc_service_pb2 as pb

LARGE = 16 << 20
SMALL = 64
# without a batch dimension, as models with such tensors mostly are: each request is executed for itself
MODELS = (
    Identity("identity", (("FP32", 2),), max_batch_size=0, instances=2, parameters=GATHER),
    Identity("large_in", (("FP32", 2), ("FP32", 2)), max_batch_size=0, instances=2, parameters=GATHER),
)
ACCESS = {"in place": "map", "copied": "copy"}


class Region:
    """A shared memory object with a large tensor in its first half, registered as "region"."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        self.size = 2 * LARGE
        self.content = messages.floats(LARGE // 4)
        self._path = Path(f"/dev/shm/inferd-bench-{os.getpid()}")
        stack.callback(self._path.unlink)
        self._path.write_bytes(self.content + bytes(LARGE))
        channel = stack.enter_context(grpc.insecure_channel(address))
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/SystemSharedMemoryRegister",
            request_serializer=pb.SystemSharedMemoryRegisterRequest.SerializeToString,
        )
        call(pb.SystemSharedMemoryRegisterRequest(name="region", key=f"/{self._path.name}", byte_size=self.size))

    def check(self) -> None:
        """Raise RuntimeError unless the second half is what the first one is."""
        with self._path.open("rb") as file:
            file.seek(LARGE)
            if file.read() != self.content:
                raise RuntimeError("wrong output in the region")

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """The second half is zeros before, and right after."""
        with self._path.open("r+b") as file:
            file.seek(LARGE)
            file.write(bytes(LARGE))
        yield
        self.check()


def placed(exchange: Exchange, *, output: bool) -> Exchange:
    """The same request with INPUT0 in the region, and with `output` OUTPUT0 behind it."""
    request = pb.ModelInferRequest.FromString(exchange.request)
    response = pb.ModelInferResponse.FromString(exchange.response)
    _refer(request.inputs[0], 0)
    del request.raw_input_contents[0]
    if output:
        _refer(request.outputs.add(name="OUTPUT0"), LARGE)
        response.raw_output_contents[0] = b""
    return Exchange(request.SerializeToString(), response.SerializeToString())


def _refer(
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor, offset: int
) -> None:
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_offset"].int64_param = offset
    tensor.parameters["shared_memory_byte_size"].int64_param = LARGE


def table(title: str, found: dict[str, Figure], base: str) -> list[str]:
    """The figures, and how they compare with the way `base`."""
    lines = [f"| {title} | requests/s | p50 | server CPU a request | rate, CPU / {base} |", "|---|---:|---:|---:|---:|"]
    for name, figure in found.items():
        rate, cpu = figure.rate / found[base].rate, figure.cpu_us / max(found[base].cpu_us, 0.01)
        lines.append(
            f"| {name} | {figure.rate:,.0f} | {figure.p50_us:,.0f} µs | {figure.cpu_us:,.1f} µs | "
            f"{rate:.2f}, {cpu:.2f} |"
        )
    return lines


def tables(folder: Path, access: str, in_flight: int, rounds: int, seconds: float) -> Iterator[list[str]]:
    """The tables of one way of access: regions used in place, or copied."""
    unix = f"unix:{folder}/{access}"
    options = ["--grpc-address", "127.0.0.1", "--grpc-address", unix, "--client-shm-access", access]
    server = inferd.start(write(folder / "models", MODELS), folder / f"{access}.log", options=options)
    with ExitStack() as stack:
        stack.callback(server.stop)
        region = Region(stack, unix)
        small, large, whole = messages.identity(SMALL), messages.large_in(LARGE), messages.identity(LARGE)

        def way(exchange: Exchange) -> Callable[[], Figure]:
            workload = Fixed([exchange.request], [exchange.response])
            return lambda: measure(server, workload, (1, in_flight), seconds, address=unix)

        yield table(
            f"input with a small output, {in_flight} in flight",
            best(
                {
                    "64 B on the wire": way(small),
                    "16 MiB in a region": way(placed(large, output=False)),
                    "16 MiB on the wire": way(large),
                },
                rounds,
            ),
            "64 B on the wire",
        )
        with region.cleared():
            yield table(
                f"identity, {in_flight} in flight",
                best({"16 MiB on the wire": way(whole), "16 MiB in a region": way(placed(whole, output=True))}, rounds),
                "16 MiB on the wire",
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--in-flight", type=int, default=4)
    arguments = parser.parse_args()
    for name, access in ACCESS.items():
        with tempfile.TemporaryDirectory(prefix="inferd-shm-") as folder:
            print(f"regions are {name} (--client-shm-access={access})\n")
            for lines in tables(Path(folder), access, arguments.in_flight, arguments.rounds, arguments.seconds):
                print(*lines, "", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
