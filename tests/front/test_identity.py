"""The identity of a certificate's owner: who may go on with a sequence, or counts as the same client."""

from __future__ import annotations

import ssl

import pytest

from inferd.server.front.peer import Peer, identified
from tests.front.certificates import Authority, Pair

NAMES = ("DNS:x", "URI:x", "email:x", "otherName:1.2.3.4;UTF8:x", "otherName:1.2.3.4;UTF8:y", "dirName:people")
PEOPLE = "\n[people]\nCN=x"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority") / "root")


def identity(authority: Authority, server: Pair, client: Pair) -> int:
    """What the server takes the client for, after a handshake in memory."""
    contexts = [ssl.create_default_context(purpose) for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH)]
    for context, pair in zip(contexts, (server, client), strict=True):
        context.load_cert_chain(pair.certificate, pair.key)
        context.load_verify_locations(authority.root)
    contexts[0].verify_mode = ssl.CERT_REQUIRED
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts[0].wrap_bio(up, down, server_side=True),
        contexts[1].wrap_bio(down, up, server_hostname="localhost"),
    ]
    waiting = ends[::-1]
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)
    return identified(Peer("", None), ends[0]).identity


def test_owners_with_one_subject_are_told_apart_by_all_kinds_of_names(authority):
    """Also by names that cannot be read: such a certificate is its own owner. A renewed one has the same owner."""
    server = authority.issue("localhost", "DNS:localhost")
    found = [identity(authority, server, authority.issue("x", name + PEOPLE)) for name in NAMES]
    assert len({*found, 0}) == len(NAMES) + 1
    assert identity(authority, server, authority.issue("x", NAMES[0])) == found[0]
    assert identity(authority, server, authority.issue("x", NAMES[0], organisation="another")) != found[0]
