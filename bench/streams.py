"""Many small responses on streams: responses per second, and the server's CPU for each.

    nice -n -5 python -m bench.streams [--seconds 2] [--rounds 3] [--triton]

A decoupled model answers a request with a thousand responses of 64 bytes: the identity backend, and a model.py with its
response sender, which Triton serves as well. Streams are ModelStreamInfer, with one request each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import grpc

from bench import inferd, messages
from bench.figures import Measured, measure
from bench.peers.base import AbsentError, Peer
from bench.peers.triton import Triton
from bench.processes import ServerProcess
from inferd_client.driver import Fixed
from inferd_client.pb import grpc_service_pb2 as pb

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
RESPONSES = 1000
ELEMENTS = 16
MODEL = f"""import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1, {ELEMENTS})
            sender = request.get_response_sender()
            for row in rows:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", row)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """backend: "BACKEND"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ DIMS ] }
instance_group { count: 1 kind: KIND_CPU }
"""
LOADS = ((1, 1), (1, 8), (4, 4))  # connections, streams at once on each


def repository(folder: Path, backends: tuple[str, ...]) -> Path:
    """One decoupled model of each backend, with its name."""
    for backend in backends:
        (folder / backend / "1").mkdir(parents=True)
        dims = "-1, -1" if backend == "identity" else "-1"
        (folder / backend / "config.pbtxt").write_text(CONFIG.replace("BACKEND", backend).replace("DIMS", dims))
        if backend == "python":
            (folder / backend / "1" / "model.py").write_text(MODEL)
    return folder


class TritonStreams(Triton):
    def launch(self) -> ServerProcess:
        home = self.home()
        return self.serve(home, repository(self.folder / "models", ("python",)), home / "backends")

    def wait_ready(self, server: ServerProcess, seconds: float) -> None:
        inferd.wait_ready(server, seconds)


def asked_once(address: str, request: bytes) -> tuple[bytes, ...]:
    """The responses of one stream, each compared with its row of the input.

    Raises:
        ValueError: they are not what was sent.
    """
    message = pb.ModelInferRequest.FromString(request)
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(PATH, None, pb.ModelStreamInferResponse.FromString)
        answers = list(call(iter([request]), timeout=60))
    got = b"".join(answer.infer_response.raw_output_contents[0] for answer in answers)
    if len(answers) != RESPONSES or got != message.raw_input_contents[0]:
        raise ValueError(f"expected {RESPONSES} responses with the rows of the input, got {len(answers)}")
    return tuple(answer.SerializeToString() for answer in answers)


def measured(server: Measured, address: str, request: bytes, load: tuple[int, int], seconds: float):
    """Responses per second, and server CPU per response in microseconds.

    Raises:
        RuntimeError: a stream failed, or its responses are others.
    """
    asked = Fixed([request], [asked_once(address, request)])
    figure = measure(server, asked, load, seconds, address=address, path=PATH)
    return figure.rate * RESPONSES, figure.cpu_us / RESPONSES


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.streams", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--triton", action="store_true", help="Triton's Python backend, too")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tensor = ("FP32", [RESPONSES, ELEMENTS], messages.floats(RESPONSES * ELEMENTS))
        own = inferd.start(repository(folder / "models", ("identity", "python")), folder / "log")
        stack.callback(own.stop)
        places: list[tuple[str, ServerProcess | Peer, str, str]] = [
            ("inferd, identity", own, own.address, "identity"),
            ("inferd, model.py", own, own.address, "python"),
        ]
        if given.triton:
            try:
                peer = stack.enter_context(TritonStreams(messages.identity(64), Path(tempfile.mkdtemp(dir=folder))))
                places.append(("Triton, model.py", peer, peer.address, "python"))
            except AbsentError as absent:
                print(f"not measured: {absent}\n")
        print("| model | connections x streams | responses/s | CPU, us a response |\n|---|---|---:|---:|")
        for load in LOADS:
            for name, server, address, model in places:
                request = messages.request(model, {"INPUT0": tensor})
                found = [measured(server, address, request, load, given.seconds) for _ in range(given.rounds)]
                rate, cpu = max(rate for rate, _ in found), min(cpu for _, cpu in found)
                print(f"| {name} | {load[0]} x {load[1]} | {rate:,.0f} | {cpu:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
