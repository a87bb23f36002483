"""Connections count from the moment at which they are accepted, before the handshake of TLS, for their clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys

import grpc
import pytest
import uvloop

from bench import steps
from inferd._native.memory.resource import live_counters
from inferd.server.front import native
from inferd.server.front.connection_limits import ClientLimits, ConnectionLimits, ListenerPolicy
from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.peer import Peer
from inferd.server.front.tls import Credentials
from tests.conformance import doors
from tests.conformance.raw import Client
from tests.front.certificates import Authority
from tests.waiting import until, wait_until

LIVE = "/inference.GRPCInferenceService/ServerLive"
ATTACKER = "127.0.0.2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@contextlib.asynccontextmanager
async def serving(authority: Authority, *, mutual: bool = False, **limits):
    pair = authority.issue("server", "DNS:localhost")
    policy = ListenPolicy(credentials=Credentials(pair.certificate, pair.key, authority.root if mutual else None))
    door = native.NativeDoor(policy=policy, **limits)
    await door.start("127.0.0.1:0")
    try:
        yield door
    finally:
        await door.stop(1.0)


def connect(address: str, source: str = "127.0.0.1") -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60, source_address=(source, 0))


def shake_hands(address: str, authority: Authority, pair=None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(authority.root))
    context.set_alpn_protocols(["h2"])
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context.wrap_socket(connect(address), server_hostname="localhost")


def is_served(address: str, authority: Authority, pair=None) -> bool:
    """Whether a new connection gets an answer: UNIMPLEMENTED is one."""
    try:
        with Client(shake_hands(address, authority, pair)) as client:
            return client.call(LIVE).status == grpc.StatusCode.UNIMPLEMENTED.value[0]
    except (OSError, AssertionError):
        return False


def count_closed(sockets: list[socket.socket]) -> int:
    """How many of them the server has closed."""
    closed = 0
    for each in sockets:
        each.setblocking(False)
        try:
            closed += each.recv(1) == b""
        except BlockingIOError:
            pass
        except ConnectionError:
            closed += 1
    return closed


def test_silent_connections_of_tls_count_and_leave_room_for_others(authority):
    """30 handshakes that do not begin hold as many connections as the server may have, and metrics show them; another
    client takes the place of the oldest. When they are gone, nothing is counted."""

    async def main() -> None:
        async with serving(authority, max_connections=10) as door:
            silent = [connect(door.addresses[0], ATTACKER) for _ in range(30)]
            await until(lambda: count_closed(silent) == 20)
            assert (door.traffic().connections, door.traffic().refused) == (10, 20)
            assert await asyncio.to_thread(is_served, door.addresses[0], authority)
            assert count_closed(silent) == 21
            for each in silent:
                each.close()
            await until(lambda: door.traffic().connections == 0)

    uvloop.run(main())


def test_silent_connections_of_tls_count_for_their_client(authority):
    """One address has no more handshakes than it may have connections."""

    async def main() -> None:
        async with serving(authority, clients=ClientLimits(connections=4)) as door:
            silent = [connect(door.addresses[0], ATTACKER) for _ in range(10)]
            await until(lambda: count_closed(silent) == 6)
            assert door.traffic().connections == 4
            assert await asyncio.to_thread(is_served, door.addresses[0], authority)
            for each in silent:
                each.close()
            await until(lambda: door.traffic().connections == 0)

    uvloop.run(main())


def test_after_the_handshake_a_connection_counts_for_its_certificate(authority):
    """Two owners behind one address have one connection each; neither has two."""
    alice, bob = authority.issue("alice"), authority.issue("bob")

    async def main() -> tuple[bool, bool, bool]:
        async with serving(authority, mutual=True, clients=ClientLimits(connections=1)) as door:
            first = await asyncio.to_thread(shake_hands, door.addresses[0], authority, alice)
            await asyncio.to_thread(first.recv, 9)  # the server's SETTINGS
            other = await asyncio.to_thread(is_served, door.addresses[0], authority, bob)
            second = await asyncio.to_thread(is_served, door.addresses[0], authority, alice)
            first.close()
            await until(lambda: door.traffic().connections == 0)
            third = await asyncio.to_thread(is_served, door.addresses[0], authority, alice)
            return other, second, third

    assert uvloop.run(main()) == (True, False, True)


def test_nothing_is_left_of_an_encrypted_connection(authority, native_counters):
    """Neither of one that has made a call nor of one that leaves after its handshake: `tls` counts the sessions."""

    async def main() -> int:
        async with serving(authority) as door:
            assert await asyncio.to_thread(is_served, door.addresses[0], authority)
            peer = await asyncio.to_thread(shake_hands, door.addresses[0], authority)
            await asyncio.to_thread(peer.recv, 9)
            open_now = live_counters()["tls"] - native_counters["tls"]
            peer.close()
            await until(lambda: door.traffic().connections == 0)
            return open_now

    assert uvloop.run(main()) == 1


def test_with_few_open_files_another_client_gets_in(tmp_path):
    """300 silent connections of one address where 128 files may be open: nobody else waits until they time out."""
    command = f"ulimit -n 128; exec {sys.executable} -m inferd serve --model-repository {tmp_path} --grpc-port 0"
    with (
        doors.running("sh", "-c", f"{command} --grpc-handshake-timeout 3600000") as process,
        Client(process.address) as before,
    ):
        assert before.call(LIVE).status == 0
        crowd = [connect(process.address, ATTACKER) for _ in range(300)]
        wait_until(lambda: count_closed(crowd) >= 172)
        for _ in range(5):
            with Client(process.address) as client:
                assert client.call(LIVE).status == 0
            assert before.call(LIVE).status == 0
        for each in crowd:
            each.close()


# ---- who makes room -------------------------------------------------------------------------------------------------


class Line:
    """A connection as the limits see it."""

    def __init__(self, admission):
        admission.driver = self
        self.admission, self.silent, self.aborted = admission, True, False

    def abort(self):
        self.aborted = True


def test_the_client_with_most_silent_connections_makes_room():
    """Connections that have spoken stay; a client keeps its place if it would have as few as the newcomer."""
    limits, policy = ConnectionLimits(max_connections=6), ListenerPolicy()
    peers = [Peer(f"ipv4:10.0.0.{number}:1") for number in range(4)]
    held = [Line(limits.admit(policy, peers[0])) for _ in range(4)] + [
        Line(limits.admit(policy, peers[1])) for _ in range(2)
    ]
    held[0].silent = False
    assert Line(limits.admit(policy, peers[2])).silent
    assert [line.aborted for line in held] == [False, True, False, False, False, False]
    limits.release(held[1].admission)  # its socket has closed now
    assert limits.count == 6
    assert limits.admit(policy, peers[0]) is None
    assert Line(limits.admit(policy, peers[3])).silent
    assert [line.aborted for line in held] == [False, True, False, False, True, False]
    assert limits.admit(policy, Peer("ipv4:10.0.0.9:1")) is not None  # the first client has two
    assert held[2].aborted
    assert limits.admit(policy, Peer("ipv4:10.0.0.10:1")) is None  # all have one


def test_a_full_listener_takes_no_places_of_others():
    limits, small, large = ConnectionLimits(), ListenerPolicy(max_connections=1), ListenerPolicy()
    held = [Line(limits.admit(large, Peer("ipv4:10.0.0.1:1"))) for _ in range(5)]
    assert limits.admit(small, Peer("ipv4:10.0.0.2:1")) is not None
    assert limits.admit(small, Peer("ipv4:10.0.0.3:1")) is None
    assert not any(line.aborted for line in held)


def test_a_full_server_refuses_without_a_look_at_all_clients():
    """Guards that a flood of connections, each of its own address, costs the same however many there are."""

    def taken(clients: int) -> int:
        limits, policy = ConnectionLimits(max_connections=clients), ListenerPolicy()
        held = [Line(limits.admit(policy, Peer(f"ipv4:10.0.{n >> 8}.{n & 255}:1"))) for n in range(clients)]
        refused = steps.count(lambda: limits.admit(policy, Peer("ipv4:10.1.0.1:1")))
        assert limits.refused == 1 and not any(line.aborted for line in held)
        return refused

    assert taken(4000) < 2 * taken(10)


def test_nothing_of_connections_that_are_gone_is_kept():
    limits, policy = ConnectionLimits(), ListenerPolicy()
    lines = [Line(limits.admit(policy, Peer(f"ipv4:10.0.0.{number}:1"))) for number in range(50)]
    for line in lines:
        limits.release(line.admission)
    del lines, line
    assert (limits.count, limits._silent, len(limits._clients)) == (0, {}, 0)
