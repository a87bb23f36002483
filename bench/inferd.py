"""The server under test, started as a user starts it: .venv/bin/inferd serve."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.processes import ServerProcess, free_port
from inferd_client.driver import Driver, Fixed
from inferd_client.pb import grpc_service_pb2 as pb

DOORS = ("native", "grpcio")
READY_PATH = "/inference.GRPCInferenceService/ServerReady"


def start(
    repository: Path,
    log: Path,
    *,
    door: str = "native",
    options: Sequence[str] = (),
    patience: float = 60.0,
    address: str = "",
    tree: Path | None = None,
) -> ServerProcess:
    """Start `inferd serve` on a repository and wait until ServerReady is true, at `address` if that is given.

    With a `tree`, the server of another source tree with its own environment.

    With an `address` of its own in the options, the server must listen on the port of --grpc-port, too.

    Raises:
        RuntimeError: it ends or does not become ready; with the end of its log.
    """
    port = free_port()
    programs = Path(sys.executable).parent if tree is None else tree / ".venv/bin"
    command: list[str | Path] = [programs / "inferd", "serve"]
    command += ["--model-repository", repository, "--grpc-port", str(port), "--transport", door, *options]
    server = ServerProcess(command, port, log=log, env={"INFERD_DEBUG_COUNTERS": "1"}, patience=patience)
    try:
        wait_ready(server, patience, address)
    except BaseException:
        server.stop()
        raise
    return server


def wait_ready(server: ServerProcess, patience: float, address: str = "") -> None:
    """Call ServerReady until it is true."""
    ready = pb.ServerReadyResponse(ready=True).SerializeToString()
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        with Driver(address or server.address) as driver:
            if driver.run(Fixed([b""], [ready]), requests=1, path=READY_PATH).correct:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server does not become ready:\n{server.log_end()}")
