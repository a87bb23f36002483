"""The worker's end of the transport."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from inferd.backends.python.worker import protocol
from inferd.backends.python.worker.link import Link, Look

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


class Silent:
    """A socket that has nothing; it counts who looks."""

    def __init__(self) -> None:
        self.looks = 0
        self.packet = 0

    def recv_into(self, *_: object) -> int:
        self.looks += 1
        if not self.packet:
            raise BlockingIOError
        return self.packet


def test_most_looks_in_vain_are_left_out_until_some_find_something():
    """Models that wait for others for longer than one looks would take the time from those."""
    silent = Silent()
    look = Look(silent)
    assert [look.for_packet(memoryview(b""), 0.0) for _ in range(1000)] == [0] * 1000
    assert silent.looks < 150
    silent.packet = 7
    assert [look.for_packet(memoryview(b""), 0.0) for _ in range(20)][-1] == 7
    assert [look.for_packet(memoryview(b""), 0.0) for _ in range(20)] == [7] * 20
    for turn in range(999):  # worth it
        silent.packet = 7 if turn % 3 == 0 else 0
        silent.looks = 0
        look.for_packet(memoryview(b""), 0.0)
        assert silent.looks == 1
