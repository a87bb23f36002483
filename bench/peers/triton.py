"""Triton Inference Server 24.10 from the wheel of PyTriton.

The wheel carries the server's binary, its core and the Python backend, and no other backend. `TritonShared` adds the
backend in C of `bench.peers.models`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import onnxruntime

from bench import messages, python_models
from bench.peers import models
from bench.peers.base import AbsentError, Peer
from bench.peers.download import unpacked_wheel
from bench.processes import ServerProcess, free_port

WHEEL = "nvidia-pytriton==0.7.0"
NUMPY_WHEEL = "numpy==1.26.4"
STUB = "triton_python_backend_stub"
STUB_PYTHON = "3.11"  # the stub is linked to the libpython of this version
START_SECONDS = 60
ONNX_RUNTIME = [Path(onnxruntime.__file__).parent]


class Triton(Peer):
    """The wheel is downloaded into the cache on first use."""

    name: ClassVar[str] = "triton"

    def version(self) -> str:
        return "Triton 2.51 (24.10), Python-backend identity"

    @staticmethod
    def home() -> Path:
        """The unpacked wheel, made ready to run."""
        if not list(Path("/usr/lib").rglob(f"libpython{STUB_PYTHON}.so.1.0")):
            raise AbsentError(f"Triton's Python backend: apt-get install libpython{STUB_PYTHON}")
        wheel = unpacked_wheel(WHEEL)
        home = wheel / "pytriton" / "tritonserver"
        stub = home / "backends" / "python" / STUB
        if not stub.exists():
            shutil.copy(home / "python_backend_stubs" / STUB_PYTHON / STUB, stub)
        for program in (stub, home / "bin" / "tritonserver"):
            program.chmod(0o755)
        return home

    def launch(self) -> ServerProcess:
        home = self.home()
        return self.serve(home, python_models.write(self.folder / "models"), home / "backends")

    def serve(self, home: Path, repository: Path, backends: Path, *options: str) -> ServerProcess:
        # The stub ignores PYTHONPATH but looks beside model.py. With numpy 2 it would hand over empty tensors.
        packages = list(unpacked_wheel(NUMPY_WHEEL, python=STUB_PYTHON).glob("numpy*"))
        for program in repository.glob("*/1/model.py"):
            needs_onnx = "import onnxruntime" in program.read_text()
            for package in (*packages, *(ONNX_RUNTIME if needs_onnx else ())):
                program.with_name(package.name).symlink_to(package)
        port = free_port()
        command: list[str | Path] = [
            home / "bin" / "tritonserver",
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            "--allow-http=false",
            "--allow-metrics=false",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={port}",
            *options,
        ]
        env = {
            "LD_LIBRARY_PATH": str(home.parent.parent / "nvidia_pytriton.libs"),
            # the stub takes its library from the first python3 found here, which must not be that of this .venv
            "PATH": "/usr/bin:/bin",
        }
        server = ServerProcess(command, port, log=self.folder / "log", env=env, patience=START_SECONDS)
        try:
            self.wait_ready(server, START_SECONDS)
        except BaseException:
            server.stop()
            raise
        return server


class TritonShared(Triton):
    """With the models that other servers read, too, in C and in Python."""

    def version(self) -> str:
        return "Triton 2.51 (24.10)"

    def launch(self) -> ServerProcess:
        home = self.home()
        options = ("--model-control-mode=explicit", *(f"--load-model={name}" for name in models.SHARED))
        return self.serve(
            home, models.write_shared(self.folder / "models"), models.backends(home / "backends"), *options
        )

    def probe(self) -> bytes:
        return messages.identity(64, "echo").request
