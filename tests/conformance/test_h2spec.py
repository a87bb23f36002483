"""An HTTP/2 conformance run over sockets: the cases of `h2cases`, each on a connection of its own.

gRPC's C core, which the grpcio door is, does not pass all of it, and is not ours to mend: the run is for the native
door, and for whatever server `--target` names.
"""

from __future__ import annotations

import socket
import time

import pytest

from tests.conformance import h2cases
from tests.conformance.h2cases import Seen

PATIENCE = 60.0  # seconds for an outcome


@pytest.fixture(scope="module")
def address(request):
    if target := request.config.getoption("--target"):
        yield target
        return
    from tests.conformance import doors

    with doors.running_door("native") as process:
        yield process.address


def exchange(address: str, data: bytes) -> Seen:
    """Send, and read until the mark is answered, or the server closes, or nothing comes for long."""
    host, port = address.rsplit(":", 1)
    received, closed = bytearray(), False
    with socket.create_connection((host, int(port))) as peer:
        try:
            peer.sendall(data)
        except OSError:
            closed = True
        end = time.monotonic() + PATIENCE
        answer = bytes([0, 0, 8, 6, 1, 0, 0, 0, 0]) + h2cases.MARK
        while not closed and answer not in received and (left := end - time.monotonic()) > 0:
            peer.settimeout(left)
            try:
                part = peer.recv(1 << 16)
            except TimeoutError:
                break
            except OSError:
                part = b""
            closed = not part
            received += part
    return Seen(h2cases.frames(bytes(received)), closed)


@pytest.mark.parametrize("case", h2cases.cases(), ids=lambda case: case.name)
def test_the_server_does_in_each_case_what_http2_demands(address, case):
    h2cases.run(case, lambda data: exchange(address, data))


def test_the_server_still_serves(address):
    case = h2cases.Case("a call", h2cases.ENDED, ("alive",))
    h2cases.run(case, lambda data: exchange(address, data))
