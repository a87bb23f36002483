"""nghttpd, the example server of nghttp2, serving a static file: the floor of HTTP/2 on a machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from bench.peers.base import AbsentError, Peer
from bench.processes import ServerProcess, free_port
from inferd_client.driver.report import frame

PATH = "inference.GRPCInferenceService/ModelInfer"


class Nghttpd(Peer):
    """Answers every POST with a file that holds the framed answer; it knows no gRPC, so there are no trailers."""

    name: ClassVar[str] = "nghttpd"
    speaks_grpc: ClassVar[bool] = False

    def version(self) -> str:
        text = subprocess.run([self._binary(), "--version"], check=True, capture_output=True, text=True).stdout
        return text.strip()

    @staticmethod
    def _binary() -> str:
        found = shutil.which("nghttpd") or shutil.which("nghttpd", path="/usr/sbin:/usr/local/sbin")
        if found is None:
            raise AbsentError("nghttpd: apt-get install nghttp2-server")
        return found

    def launch(self) -> ServerProcess:
        binary = self._binary()
        document = self.folder / PATH
        document.parent.mkdir(parents=True, exist_ok=True)
        document.write_bytes(frame(self.exchange.response))
        port = free_port()
        command: list[str | Path] = [binary, "--no-tls", "--address=127.0.0.1", "-d", self.folder, str(port)]
        return ServerProcess(command, port, log=self.folder / "log")
