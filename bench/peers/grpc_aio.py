"""grpc.aio on uvloop: a generic handler on raw bytes that answers a constant, the most that it can do in Python."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import ClassVar

import grpc
import grpc.aio
import uvloop

from bench.peers.base import Peer
from bench.processes import ServerProcess, free_port

METHOD = "/inference.GRPCInferenceService/ModelInfer"

# For a server that has to stay up under load; without limits on streams and pending requests grpc.aio loses calls.
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_connection_age_ms", 1_800_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
)


class GrpcAioEcho(Peer):
    """Runs this file as a program."""

    name: ClassVar[str] = "grpc.aio"

    def version(self) -> str:
        return f"grpcio {grpc.__version__}, uvloop {uvloop.__version__}, Python {sys.version.split()[0]}"

    def launch(self) -> ServerProcess:
        answer = self.folder / "answer"
        answer.write_bytes(self.exchange.response)
        port = free_port()
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "bench.peers.grpc_aio",
            "--port",
            str(port),
            "--answer",
            answer,
        ]
        return ServerProcess(command, port, log=self.folder / "log")


async def serve(port: int, answer: bytes) -> None:
    """Answer every ModelInfer with `answer` until the process is told to end."""

    async def infer(_request: bytes, _context: object) -> bytes:
        return answer

    handler = grpc.unary_unary_rpc_method_handler(infer)
    server = grpc.aio.server(options=OPTIONS)
    service, method = METHOD[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.port, arguments.answer.read_bytes()))


if __name__ == "__main__":
    main()
