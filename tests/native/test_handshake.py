"""Handshakes of TLS in the I/O thread and the thread pool: what ends them, and that nothing of OpenSSL's is left."""

from __future__ import annotations

import contextlib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest

from inferd._native.transport.connection import Connection
from inferd._native.transport.handshake import Handshake
from inferd._native.transport.thread_pool import PoolThreads
from inferd._native.transport.tls import TlsContext
from tests.conformance.raw import Client
from tests.front.certificates import Authority
from tests.native.threaded import Threaded
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority")).issue("server", "DNS:localhost")


class Door(Threaded):
    """With TLS."""

    def __init__(self, pair, pool_threads: PoolThreads | None = None) -> None:
        super().__init__(lambda call: None, pool_threads)
        self.context = TlsContext(pair.certificate.read_bytes(), pair.key.read_bytes())
        self.over: list[Handshake] = []

    def accept(self) -> tuple[socket.socket, Handshake]:
        """A client's end, and the handshake of the server's."""
        ours, theirs = self.sockets()
        handshake = Handshake(self.io, self.context, theirs.fileno(), 1, lambda: self.over.append(handshake))
        return ours, handshake

    def hear(self) -> list[Handshake]:
        """The handshakes that are over."""
        self.timers.run_events()
        return self.over

    def close(self) -> None:
        super().close()
        self.over.clear()


def encrypted(end: socket.socket) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(end)


def test_nothing_of_a_session_is_left(pair):
    """The connection is served and closed; `native_counters` looks for sessions that are left."""
    with contextlib.closing(Door(pair)) as door, ThreadPoolExecutor(1) as other:
        for number in range(1, 4):
            end, handshake = door.accept()
            client = other.submit(encrypted, end)
            wait_until(lambda: len(door.hear()) == number)  # noqa: B023
            assert handshake.done
            connection = Connection(door.endpoint)
            door.io.take(connection, door.ends[-1].fileno(), handshake)
            with Client(client.result(60)) as peer:
                peer.h2.ping(bytes(8))
                peer.flush()
                peer.receive_until(lambda: peer.pings)


def test_an_aborted_handshake_needs_no_thread_of_the_pool(pair):
    """No thread of the pool is free for the client's first bytes. The handshake is over nevertheless."""
    with contextlib.closing(Door(pair, PoolThreads(1))) as door:  # it has not been started
        end, handshake = door.accept()
        end.sendall(b"\x16\x03\x01")
        handshake.abort()
        assert end.recv(1) == b""
        wait_until(lambda: door.hear() == [handshake])
        assert not handshake.done


@pytest.mark.parametrize("spoken", [b"", b"\x16\x03\x01"], ids=["silent", "begun"])
def test_handshakes_end_with_the_threads(pair, spoken):
    """The threads stop while a client is silent, or in the middle of its first message: its socket does not stay."""
    with contextlib.closing(Door(pair)) as door:
        end, handshake = door.accept()
        end.sendall(spoken)
        door.io.stop()
        handshake.abort()
        assert door.hear() == [handshake]
        assert not handshake.done
        handshake.abort()
        assert door.hear() == [handshake], "the owner hears it once"
        with pytest.raises(OSError, match="have ended"):
            door.io.take(Connection(door.endpoint), door.ends[-1].fileno(), handshake)
