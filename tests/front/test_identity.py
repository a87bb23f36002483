"""The identity of a certificate's owner: who may go on with a sequence, or counts as the same client."""

from __future__ import annotations

import select
import socket
import ssl

import pytest

from inferd._native.timers import TimersHandle
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.handshake import Handshake
from inferd._native.transport.io_thread import IoThreads
from inferd._native.transport.tls import TlsContext
from inferd.server.front.peer import Peer, identified
from tests.front.certificates import Authority, Pair

NAMES = ("DNS:x", "URI:x", "email:x", "otherName:1.2.3.4;UTF8:x", "otherName:1.2.3.4;UTF8:y", "dirName:people")
PEOPLE = "\n[people]\nCN=x"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority") / "root")


def identity(authority: Authority, server: Pair, client: Pair) -> int:
    """What the server takes the client for, after the handshake."""
    context = TlsContext(server.certificate.read_bytes(), server.key.read_bytes(), authority.root.read_bytes())
    timers, over = TimersHandle(), list[bool]()
    io = IoThreads(Endpoint(lambda call: None, timers=timers))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    events = timers.hear()
    io.start()
    try:
        handshake = Handshake(io, context, theirs.fileno(), 1, lambda: over.append(True))
        own = ssl.create_default_context(cafile=authority.root)
        own.load_cert_chain(client.certificate, client.key)
        own.set_alpn_protocols(["h2"])
        ours.settimeout(60)
        with own.wrap_socket(ours, server_hostname="localhost"):
            while not over:
                assert select.select([events], [], [], 60)[0]
                timers.run_events()
            assert handshake.done, handshake.failure
            return identified(Peer("", None), handshake).identity
    finally:
        io.stop()
        theirs.close()


def test_owners_with_one_subject_are_told_apart_by_all_kinds_of_names(authority):
    """Names that cannot be read count, too: such a certificate is its own owner. A renewed one has the same owner."""
    server = authority.issue("localhost", "DNS:localhost")
    found = [identity(authority, server, authority.issue("x", name + PEOPLE)) for name in NAMES]
    assert len({*found, 0}) == len(NAMES) + 1
    assert identity(authority, server, authority.issue("x", NAMES[0])) == found[0]
    assert identity(authority, server, authority.issue("x", NAMES[0], organisation="another")) != found[0]
