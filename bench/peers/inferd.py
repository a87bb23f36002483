"""The server under test, behind either of its doors, and with the model.py files that Triton gets."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from bench import inferd, python_models, system
from bench.peers import models
from bench.peers.base import Peer
from bench.processes import ServerProcess
from bench.repository import BENCH, write


class Inferd(Peer):
    """The server under test behind one of its doors."""

    name: ClassVar[str] = "inferd"
    door: ClassVar[str] = "native"
    tree: Path | None = None  # another one

    def version(self) -> str:
        return system.source_version()

    def launch(self) -> ServerProcess:
        return self.serve(write(self.folder / "models", BENCH))

    def serve(self, repository: Path) -> ServerProcess:
        return inferd.start(repository, self.folder / "log", door=self.door, tree=self.tree)


class InferdPython(Inferd):
    """With the model.py files that Triton gets."""

    name: ClassVar[str] = "inferd (model.py)"

    def launch(self) -> ServerProcess:
        return self.serve(python_models.write(self.folder / "models"))


class InferdGrpcio(Inferd):
    name: ClassVar[str] = "inferd (grpcio door)"
    door: ClassVar[str] = "grpcio"


class InferdShared(Inferd):
    """With the models that other servers read, too, in C and in Python, on TCP and on a unix socket."""

    @property
    def unix(self) -> str:
        return f"unix:{self.folder}/socket"

    def launch(self) -> ServerProcess:
        return inferd.start(
            models.write_own(self.folder / "models"),
            self.folder / "log",
            door=self.door,
            options=(
                f"--backend-directory={models.backends()}",
                "--model-control-mode=explicit",
                *(f"--load-model={name}" for name in ("identity", *models.SHARED)),
                "--grpc-address=127.0.0.1",
                f"--grpc-address={self.unix}",
            ),
        )


class InferdSharedGrpcio(InferdShared):
    name: ClassVar[str] = "inferd (grpcio door)"
    door: ClassVar[str] = "grpcio"
