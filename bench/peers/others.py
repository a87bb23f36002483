"""Other servers in Python: those with the v2 protocol, and those with one of their own.

The latter are asked over HTTP/1.1 by h2load, whose figures are for orientation: another protocol, another message.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

from bench.peers.base import Peer
from bench.peers.environments import python_of, version_of
from bench.processes import ServerProcess, free_port

PROGRAMS = Path(__file__).with_name("programs")
PATIENCE = 120.0


class OtherServer(Peer):
    """A program of `programs`, run by the interpreter of its environment."""

    environment: ClassVar[str]

    def version(self) -> str:
        return version_of(self.environment)

    def run(self, port: int, *arguments: str | Path, env: dict[str, str] | None = None) -> ServerProcess:
        python = python_of(self.environment)
        paths = {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{PROGRAMS}:{PROGRAMS.parents[2]}",
            "HOME": str(self.folder),
        }
        server = ServerProcess(
            [python, *arguments], port, log=self.folder / "log", env=paths | (env or {}), patience=PATIENCE
        )
        try:
            if self.speaks_grpc:
                self.wait_ready(server, PATIENCE)
        except BaseException:
            server.stop()
            raise
        return server


class MLServer(OtherServer):
    name: ClassVar[str] = "MLServer"
    environment: ClassVar[str] = "mlserver"

    def launch(self) -> ServerProcess:
        port, http_port, metrics_port = free_port(), free_port(), free_port()
        said = {"host": "127.0.0.1", "grpc_port": port, "http_port": http_port, "metrics_port": metrics_port}
        (self.folder / "settings.json").write_text(json.dumps({**said, "parallel_workers": 0, "debug": False}))
        model = {"name": "identity", "implementation": "mlserver_model.Echo"}
        (self.folder / "model-settings.json").write_text(json.dumps(model))
        return self.run(port, python_of("mlserver").with_name("mlserver"), "start", self.folder)


class KServe(OtherServer):
    name: ClassVar[str] = "KServe SDK"
    environment: ClassVar[str] = "kserve"

    def launch(self) -> ServerProcess:
        port = free_port()
        return self.run(port, PROGRAMS / "kserve_server.py", str(port), str(free_port()))


class RayServe(OtherServer):
    name: ClassVar[str] = "Ray Serve"
    environment: ClassVar[str] = "ray"
    rests: ClassVar[bool] = False

    def launch(self) -> ServerProcess:
        port = free_port()
        return self.run(
            port, PROGRAMS / "ray_app.py", str(port), str(free_port()), env={"RAY_USAGE_STATS_ENABLED": "0"}
        )


class HttpServer(OtherServer):
    """A server that is asked over HTTP/1.1, by a POST of `body` to `path`."""

    speaks_grpc: ClassVar[bool] = False
    path: ClassVar[str] = "/predict"
    media_type: ClassVar[str] = "application/json"
    numbers: ClassVar[str] = "input"

    @property
    def body(self) -> bytes:
        return json.dumps({self.numbers: [i * 0.5 + 1.0 for i in range(16)]}).encode()


class Mosec(HttpServer):
    name: ClassVar[str] = "mosec"
    environment: ClassVar[str] = "mosec"
    path: ClassVar[str] = "/inference"
    media_type: ClassVar[str] = "application/octet-stream"

    @property
    def body(self) -> bytes:
        return self.exchange.request

    def launch(self) -> ServerProcess:
        port = free_port()
        return self.run(port, PROGRAMS / "mosec_server.py", "--address", "127.0.0.1", "--port", str(port))


class LitServe(HttpServer):
    name: ClassVar[str] = "LitServe"
    environment: ClassVar[str] = "litserve"

    def launch(self) -> ServerProcess:
        port = free_port()
        return self.run(port, PROGRAMS / "litserve_server.py", str(port))


class BentoML(HttpServer):
    name: ClassVar[str] = "BentoML"
    numbers: ClassVar[str] = "numbers"
    environment: ClassVar[str] = "bentoml"

    def launch(self) -> ServerProcess:
        port = free_port()
        command = ("-m", "bentoml", "serve", "bentoml_service:Echo", "--host", "127.0.0.1", "--port", str(port))
        return self.run(port, *command, env={"BENTOML_DO_NOT_TRACK": "1"})
