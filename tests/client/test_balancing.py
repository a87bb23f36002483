"""Load balancing of both clients: several addresses, their health, names that resolve anew; copies; errors of TLS."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import pickle
import signal
import socket
import threading
from concurrent import futures

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import inferd_client.grpc as grpcclient
import inferd_client.grpc.aio as aioclient
from bench.processes import free_port
from inferd_client import _balancing, _channel, _loops
from inferd_client.pb import grpc_service_pb2 as pb
from inferd_client.utils import InferenceServerException


class Peer:
    """A server of grpcio that counts ServerLive, with a health service of its own."""

    def __init__(self, port=0, watches=None):
        self.calls = 0
        self.health = health.HealthServicer()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        live = grpc.unary_unary_rpc_method_handler(
            self._live, pb.ServerLiveRequest.FromString, pb.ServerLiveResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ServerLive": live})]
        )
        health_pb2_grpc.add_HealthServicer_to_server(watches or self.health, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.serves(True)
        self._server.start()

    def _live(self, request, context):
        self.calls += 1
        return pb.ServerLiveResponse(live=True)

    def serves(self, yes):
        kind = health_pb2.HealthCheckResponse
        self.health.set("", kind.SERVING if yes else kind.NOT_SERVING)

    def stop(self):
        self._server.stop(None).wait()


@pytest.fixture
def peers():
    found = [Peer(), Peer(), Peer()]
    yield found
    for each in found:
        each.stop()


class Client:
    """Either client, for a test without coroutines."""

    def __init__(self, module, url, **said):
        self._loop = asyncio.new_event_loop() if module is aioclient else None
        self._client = module.InferenceServerClient(url, **said)

    def _done(self, answer):
        return self._loop.run_until_complete(answer) if self._loop else answer

    def call(self, times=1, timeout=30):
        for _ in range(times):
            assert self._done(self._client.is_server_live(client_timeout=timeout))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._done(self._client.close())
        if self._loop:
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()


def url_of(peers):
    return "ipv4:" + ",".join(f"127.0.0.1:{each.port}" for each in peers)


def counts(peers):
    found = [each.calls for each in peers]
    for each in peers:
        each.calls = 0
    return found


def settle(client, peers, expected):
    """Make calls until a dozen of them is shared like this."""
    while True:
        counts(peers)
        client.call(12)
        if counts(peers) == expected:
            return


MODULES = pytest.mark.parametrize("module", [grpcclient, aioclient])


@MODULES
@pytest.mark.parametrize(
    "said",
    [
        {"load_balancing": "round_robin"},
        {"load_balancing": "round_robin", "connections": 2},
        {"channel_args": [("grpc.lb_policy_name", "round_robin")]},
        {"channel_args": [("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')]},
    ],
)
def test_calls_take_turns(peers, module, said):
    """Guards round_robin: once all addresses are connected, each has a third of the calls."""
    with Client(module, url_of(peers), **said) as client:
        settle(client, peers, [4, 4, 4])
        client.call(60)
        assert counts(peers) == [20, 20, 20]


@MODULES
def test_the_first_address_that_answers(peers, module):
    """Guards pick_first, the default: one address has all calls, the next one when it cannot be reached."""
    dead = type("Dead", (), {"port": free_port()})
    with Client(module, url_of([dead, *peers])) as client:
        client.call(9)
    assert counts(peers) == [9, 0, 0]
    with Client(module, url_of([dead, *peers]), load_balancing="round_robin") as client:
        while min(each.calls for each in peers) < 2:
            client.call()
    with (
        Client(module, url_of([dead, dead]), load_balancing="round_robin") as client,
        pytest.raises(InferenceServerException, match="failed to connect"),
    ):
        client.call()


@contextlib.contextmanager
def dropping():
    """A port that drops what is sent to it, as behind a firewall: its listener's queue is full."""
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield type("Dropping", (), {"port": listener.getsockname()[1]})


@MODULES
@pytest.mark.parametrize("policy", _balancing.POLICIES)
def test_an_address_that_drops_packets_leaves_time_for_the_next(peers, module, policy):
    """Guards that one address does not use up the time of the call."""
    with dropping() as dead, Client(module, url_of([dead, peers[0]]), load_balancing=policy) as client:
        client.call(timeout=2)
    assert peers[0].calls == 1


@MODULES
def test_an_address_of_a_family_that_the_system_lacks(peers, module, monkeypatch):
    """Guards that the next address is tried, as where a name has an address of IPv6 and the system has no IPv6."""
    real = socket.getaddrinfo

    def resolve(host, port, *arguments, **said):
        if host != "models.test":
            return real(host, port, *arguments, **said)
        lacks = (socket.AF_MAX if hasattr(socket, "AF_MAX") else 12345, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0))
        return [lacks, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", peers[0].port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with Client(module, "models.test:1") as client:
        client.call()


def test_a_link_local_address_keeps_its_interface():
    """Guards round_robin with fe80::1%eth0, which is nothing without the interface."""
    found = socket.getaddrinfo("fe80::1%lo", 8001, type=socket.SOCK_STREAM)
    ((host, port),) = _balancing.numeric(found)
    assert socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4] == found[0][4]


@MODULES
def test_a_server_that_does_not_serve_gets_no_calls(peers, module):
    """Guards the health of each address: it leaves, comes back, and if nobody serves, the calls go on."""
    with Client(module, url_of(peers), load_balancing="round_robin") as client:
        settle(client, peers, [4, 4, 4])
        peers[1].serves(False)
        settle(client, peers, [6, 0, 6])
        peers[1].serves(True)
        settle(client, peers, [4, 4, 4])
        for each in peers:
            each.serves(False)
        client.call(30)


@MODULES
def test_a_lost_server_is_left_and_found_again(peers, module):
    """Guards that calls go on without an address that is gone, and use it when it is back."""
    with Client(module, url_of(peers), load_balancing="round_robin") as client:
        settle(client, peers, [4, 4, 4])
        peers[0].stop()
        client.call(30)
        peers[0] = Peer(peers[0].port)
        while not peers[0].calls:
            client.call()


class TwoWatches(health_pb2_grpc.HealthServicer):
    """Of two calls that watch the health, the first learns that the server serves, once the second has begun."""

    def __init__(self):
        self.begun = [threading.Event(), threading.Event()]
        self._numbers = itertools.count()

    def Watch(self, request, context):  # noqa: N802 (the RPC's name)
        number = next(self._numbers)
        ended = threading.Event()
        context.add_callback(ended.set)
        self.begun[number].set()
        self.begun[1].wait()
        if number == 0:
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        ended.wait()


@MODULES
def test_two_connections_to_one_address_are_made_at_the_same_time(peers, module, monkeypatch):
    """Guards the call: each connection waits for its own server's health, not for that of the later one."""
    watches = TwoWatches()
    both = Peer(watches=watches)
    peers.append(both)
    begin, begin_in_loop = _channel.connect, _loops.connect_in_loop

    def connect(target, *arguments):
        if target.port == both.port and threading.current_thread() is not threading.main_thread():
            watches.begun[0].wait()
        return begin(target, *arguments)

    async def connect_in_loop(target, *arguments):
        if target.port == both.port and asyncio.current_task().get_coro().__name__ == "_try":
            await asyncio.to_thread(watches.begun[0].wait)
        return await begin_in_loop(target, *arguments)

    monkeypatch.setattr(_channel, "connect", connect)
    monkeypatch.setattr(_loops, "connect_in_loop", connect_in_loop)
    for each in (_channel, _loops):
        monkeypatch.setattr(each, "HEALTH_SECONDS", 60.0)
    with Client(module, url_of([peers[0], both]), load_balancing="round_robin") as client:
        client.call()  # connects to the first address, and begins a connection to the second in the background
        peers[0].stop()
        client.call(timeout=20)
    assert both.calls == 1


class Mute(health_pb2_grpc.HealthServicer):
    """Says nothing of its health."""

    def __init__(self):
        self.begun, self.ended = threading.Event(), threading.Event()

    def Watch(self, request, context):  # noqa: N802 (the RPC's name)
        context.add_callback(self.ended.set)
        self.begun.set()
        self.ended.wait()
        yield from ()


class Interrupted(Exception):
    """Raised by the handler of a signal."""


@pytest.fixture
def mute():
    watches = Mute()
    peer = Peer(watches=watches)
    yield peer, watches
    peer.stop()


def test_a_call_is_interrupted_while_it_connects(mute, monkeypatch):
    """Guards the connection, which is closed, though it takes no calls yet."""
    peer, watches = mute
    monkeypatch.setattr(_channel, "HEALTH_SECONDS", 60.0)

    def interrupt(number, frame):
        raise Interrupted

    def send():
        watches.begun.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    before = signal.signal(signal.SIGUSR1, interrupt)
    sender.start()
    try:
        with Client(grpcclient, url_of([peer]), load_balancing="round_robin") as client:
            with pytest.raises(Interrupted):
                client.call(timeout=None)
            assert watches.ended.wait(30)
    finally:
        # One may still be sent, where the call has ended otherwise: what was set before would end the process.
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        watches.begun.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


async def test_a_call_is_cancelled_while_it_connects(mute, monkeypatch):
    """Guards the connection, which is closed, though it takes no calls yet."""
    peer, watches = mute
    monkeypatch.setattr(_loops, "HEALTH_SECONDS", 60.0)
    async with aioclient.InferenceServerClient(url_of([peer]), load_balancing="round_robin") as client:
        call = asyncio.create_task(client.is_server_live())
        await asyncio.to_thread(watches.begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(watches.ended.wait, 30)


@MODULES
def test_a_name_is_resolved_again(peers, module, monkeypatch):
    """Guards re-resolution: new addresses get calls, and one that the name has no more gets none."""
    named = [peers[0]]
    real = socket.getaddrinfo

    def resolve(host, port, *arguments, **said):
        if host != "models.test":
            return real(host, port, *arguments, **said)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each.port)) for each in named]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(_balancing, "RESOLVE_SECONDS", 0.0)
    with Client(module, "models.test:1", load_balancing="round_robin") as client:
        client.call(3)
        assert counts(peers) == [3, 0, 0]
        named[:] = peers[1:]
        while not (peers[1].calls and peers[2].calls):
            client.call()
        counts(peers)
        client.call(10)
        assert counts(peers) == [0, 5, 5]


def test_policies_that_there_are_not():
    """Guards the error, and that the first known policy of a service config counts."""
    with pytest.raises(InferenceServerException, match="pick_first or round_robin"):
        grpcclient.InferenceServerClient("localhost:1", load_balancing="random")
    with pytest.raises(InferenceServerException, match=r"grpc\.service_config"):
        grpcclient.InferenceServerClient("localhost:1", channel_args=[("grpc.service_config", "{")])


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))])
def test_requests_and_responses_are_copied(again):
    """Guards pickle and copies of inputs, requested outputs and responses, with all that was set."""
    given = grpcclient.InferInput("A", [2], "FP32").set_data_from_numpy(np.array([1, 2], np.float32))
    far = grpcclient.InferInput("B", [2], "FP32").set_shared_memory("region", 8, 16)
    output = grpcclient.InferRequestedOutput("C", class_count=2)
    for each in (given, far):
        other = again(each)
        assert (other.name(), other.shape(), other.datatype()) == (each.name(), each.shape(), each.datatype())
        assert other._written() == each._written()
    assert bytes(again(given)._content) == bytes(given._content)
    assert again(output)._written() == output._written()
    response = pb.ModelInferResponse(
        model_name="m", id="7", raw_output_contents=[np.arange(3, dtype=np.int32).tobytes()]
    )
    response.outputs.add(name="OUT", datatype="INT32", shape=[3])
    result = again(grpcclient.InferResult(response))
    assert (result.model_name, result.id, result.as_numpy("OUT").tolist()) == ("m", "7", [0, 1, 2])
    result.as_numpy("OUT")[0] = 9


def test_errors_of_tls_files_name_them(tmp_path):
    """Guards which file cannot be read, or has the wrong content."""
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for said in ({"root_certificates": "none.pem"}, {"certificate_chain": "none.pem"}, {"root_certificates": broken}):
        (named,) = said.values()
        with pytest.raises(OSError, match=str(named)):
            grpcclient.InferenceServerClient("localhost:1", ssl=True, **{key: str(path) for key, path in said.items()})
