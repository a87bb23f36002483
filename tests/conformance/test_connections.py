"""How long connections live, on the real server with real clients: keepalive, strikes, age, greeting, their number."""

from __future__ import annotations

import socket
import threading
import time

import grpc
import psutil
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.raw import Client
from tests.waiting import wait_until

LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture
def empty(tmp_path):
    """A repository without models."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def serving(empty):
    def start(transport, *arguments):
        return doors.running_server(transport, empty, *arguments)

    return start


def connections(process) -> int:
    """How many the server has, with those that the client has closed and the server has not."""
    port = int(process.address.rsplit(":", 1)[1])
    found = psutil.Process(process.pid).net_connections("tcp")
    return sum(c.status != psutil.CONN_LISTEN and c.laddr.port == port for c in found)


def is_served(address) -> bool:
    """Whether a new connection gets an answer."""
    try:
        with Client(address) as client:
            return client.call(LIVE).status == 0
    except OSError:
        return False


def test_a_client_that_lives_is_kept(serving):
    """The server pings again only when the ping before has been answered; nothing depends on how soon that was."""
    with (
        serving("native", "--grpc-keepalive-time=100", "--grpc-keepalive-timeout=60000") as process,
        Client(process.address) as client,
    ):
        client.headers(LIVE)  # a call that goes on: without one, and without data, there are few pings
        client.receive_until(lambda: client.pinged == 2)
        assert client.call(LIVE).status == 0


def test_pings_without_calls_only_where_permitted(serving):
    options = ("--grpc-keepalive-time=300", "--grpc-keepalive-timeout=300")
    with (
        serving("native", *options, "--grpc-keepalive-permit-without-calls=false") as process,
        Client(process.address) as idle,
        Client(process.address) as busy,
    ):
        idle.call(LIVE)
        busy.call(LIVE)
        busy.headers(LIVE)  # a call that goes on
        wait_until(lambda: connections(process) == 1)  # neither answers pings, so the one that gets them is dropped
        assert idle.call(LIVE).status == 0


def test_a_silent_socket_is_dropped_although_it_reads_nothing(serving):
    with (
        serving("native", "--grpc-keepalive-time=300", "--grpc-keepalive-timeout=300") as process,
        Client(process.address) as client,
    ):
        client.call(LIVE)
        wait_until(lambda: connections(process) == 0)


@pytest.mark.parametrize("transport", doors.NAMES)
def test_too_many_pings(serving, transport):
    with serving(transport, "--grpc-http2-max-ping-strikes=3") as process, Client(process.address) as client:
        client.call(LIVE)
        for number in range(10):
            try:
                client.h2.ping(b"%08d" % number)
                client.flush()
                client.receive_until(lambda number=number: client.pings > number or client.goaway is not None)
            except OSError:
                break
        client.receive_until(lambda: client.goaway is not None)
        assert (client.goaway.error_code, client.goaway.additional_data) == (11, b"too_many_pings")
        client.receive_until(lambda: False)
        assert client.closed
        assert client.pings >= 3


@pytest.mark.parametrize("transport", doors.NAMES)
def test_rare_pings_are_answered(serving, transport):
    with (
        serving(transport, "--grpc-http2-min-recv-ping-interval-without-data=50") as process,
        Client(process.address) as client,
    ):
        for number in range(1, 6):
            client.h2.ping(b"%08d" % number)
            client.flush()
            client.receive_until(lambda number=number: client.pings == number)
            time.sleep(0.1)
        assert client.goaway is None


@pytest.mark.parametrize("transport", doors.NAMES)
def test_an_old_connection_ends_and_no_call_is_lost(serving, transport):
    """Calls without a pause over connections that live half a second each, until each has been replaced."""
    live = pb.ServerLiveResponse(live=True).SerializeToString()
    with serving(transport, "--grpc-max-connection-age=500", "--grpc-max-connection-age-grace=5000") as process:
        ports = set()
        failures = []
        over = threading.Event()

        def work():
            with grpc.insecure_channel(process.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                call = channel.unary_unary(LIVE)
                while not over.is_set():
                    try:
                        assert call(b"", timeout=60) == live
                    except grpc.RpcError as error:
                        failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        server = psutil.Process(process.pid)

        def replaced():
            ports.update(c.raddr.port for c in server.net_connections("tcp") if c.raddr)
            return len(ports) >= 12

        try:
            wait_until(replaced)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert not failures


def test_who_does_not_speak_http2_is_dropped(serving):
    """A client that does, and has connected before, stays."""
    with serving("native", "--grpc-handshake-timeout=2000") as process, Client(process.address) as client:
        host, port = process.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"PRI * HTTP/2.0\r\n")  # and nothing more
            for peer in (silent, slow):
                peer.settimeout(60)
                while peer.recv(1000):
                    pass
        assert client.call(LIVE).status == 0


def test_the_number_of_connections_is_limited(serving):
    with serving("native", "--grpc-max-connections=3") as process:
        kept = [Client(process.address) for _ in range(3)]
        for client in kept:
            assert client.call(LIVE).status == 0
        with Client(process.address) as refused:
            refused.receive_until(lambda: False)
            assert refused.closed
        for client in kept:
            assert client.call(LIVE).status == 0
        kept.pop().__exit__()
        wait_until(lambda: is_served(process.address))
        for client in kept:
            client.__exit__()


def cpu_seconds(process, seconds):
    """The CPU seconds that a process uses in so many seconds."""
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def test_a_thousand_idle_connections_use_no_cpu(serving):
    with serving("native") as process:
        host, port = process.address.rsplit(":", 1)
        server = psutil.Process(process.pid)
        idle = []
        try:
            hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
            for _ in range(400):  # many hosts allow 1,024 files
                peer = socket.create_connection((host, int(port)))
                peer.sendall(hello)
                idle.append(peer)
            wait_until(lambda: cpu_seconds(server, 1) <= 0.05)  # when all of them have been greeted
        finally:
            for peer in idle:
                peer.close()
