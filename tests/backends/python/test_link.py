"""The worker's end of the transport."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from backends.python.worker import protocol
from backends.python.worker.link import Link

NUMBER = 7


@pytest.fixture
def sockets() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the server's end of its work socket."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    arena = os.memfd_create("arena")
    os.truncate(arena, 4096)

    def gone() -> None:
        raise EOFError

    link = Link(*(its.detach() for _, its in pairs), arena, gone)
    yield link, pairs[0][0]
    link.close()
    for server, _ in pairs:
        server.close()


@pytest.mark.parametrize("patience", [0.0, 1e-9, 3600.0])
def test_a_packet_is_received_while_one_looks_for_it_and_while_one_sleeps(sockets, patience):
    link, server = sockets
    link.patience = patience
    packet = protocol.HEAD.pack(protocol.EXECUTE, 0, 0, 0, NUMBER, 0)
    server.send(packet)
    assert link.receive_work().id == NUMBER
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(link.receive_work)
        server.send(packet)
        assert received.result(30).id == NUMBER


@pytest.mark.parametrize("patience", [0.0, 1e-9, 3600.0])
def test_the_end_of_the_server_is_seen(sockets, patience):
    link, server = sockets
    link.patience = patience
    server.close()
    with pytest.raises(EOFError):
        link.receive_work()
