"""The ledger counts memory: under each attack the process grows by no more than the metrics show as held, and a polite
client beside it loses nothing.

What the server holds at most is small here, so that each attack is over in a moment; a fault shows as hundreds of MiB.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2

from tests.conformance import raw
from tests.conformance.client import Stub, output, request
from tests.conformance.held import NAME as HELD
from tests.conformance.held import add_held_model
from tests.framing import framed
from tests.observe.scraping import scrape, scraped_server
from tests.waiting import wait_until

KIB, MIB = 1 << 10, 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
WATCH = "/grpc.health.v1.Health/Watch"
INITIAL_WINDOW_SIZE = 4
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8

LIMIT = 96 * MIB
FACTOR, CONSTANT = 1.3, 64 * MIB
"""The process may grow by so much more than the metrics show: free blocks, the interpreter, clients' connections."""

PAIR = """
backend: "identity"
max_batch_size: 0
input [{ name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_UINT8 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_UINT8 dims: [ -1 ] }]
"""
SEQUENCE = """
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
sequence_batching { max_sequence_idle_microseconds: 60000000 }
"""


class Watched:
    """A server, with a polite client that calls all the time, and what both figures of memory have been."""

    def __init__(self, process, metrics) -> None:
        self.process, self.metrics = process, metrics
        self.address = process.address
        self._rss = psutil.Process(process.pid)
        self._stop = threading.Event()
        self._caller = threading.Thread(target=self._call)
        self.answered, self.lost = 0, []
        self.before = self.grown = self.held = 0

    def _call(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            stub = Stub(channel)
            while not self._stop.is_set():
                sent = np.full(2000, self.answered % 100, np.uint8)
                try:
                    answer = stub.ModelInfer(request("pair", sent, sent[:10]), timeout=60)
                    assert output(answer).tolist() == sent.tolist()
                except (grpc.RpcError, AssertionError) as error:
                    self.lost.append(error)
                self.answered += 1
                self._stop.wait(0.01)

    def __enter__(self):
        self._caller.start()
        wait_until(lambda: self.answered >= 3)
        self.before = self._rss.memory_info().rss
        return self

    def __exit__(self, *_) -> None:
        count = self.answered
        wait_until(lambda: self.answered > count, "the polite client is not served")
        self._stop.set()
        self._caller.join()

    def look(self) -> int:
        """Note both figures; what is held."""
        held = int(sum(size for (name, _), size in scrape(self.metrics).samples.items() if name == "inferd_held_bytes"))
        self.held = max(self.held, held)
        self.grown = max(self.grown, self._rss.memory_info().rss - self.before)
        return held

    def check(self) -> None:
        """Check that the memory that the server has taken is the memory that it shows, and within its limit."""
        assert not self.lost, self.lost[:3]
        assert self.grown <= FACTOR * self.held + CONSTANT, f"{self.grown >> 20} MiB, shown {self.held >> 20}"
        assert self.grown <= FACTOR * LIMIT + CONSTANT

    def forgets(self) -> None:
        """Check that held memory goes back to the system within seconds."""
        wait_until(lambda: self.look() < MIB, "something is held for clients that have left")
        wait_until(
            lambda: self._rss.memory_info().rss - self.before < CONSTANT, f"the peak stays: {self.grown >> 20} MiB"
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("counted")
    for name, config in {"pair": PAIR, "sequence": SEQUENCE}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    add_held_model(root)
    unix = tmp_path_factory.mktemp("unix") / "s"
    options = (f"--max-held-bytes={LIMIT}", "--grpc-address=127.0.0.1", f"--grpc-address=unix:{unix}")
    with scraped_server(root, *options) as (process, metrics):
        process.unix = str(unix)
        process.repository = root
        yield process, metrics


@pytest.fixture
def watched(server):
    with Watched(*server) as made:
        yield made


def send(client, stream, data, *, end=True):
    """All of it, as flow control allows."""
    at = 0
    while at < len(data):
        client.receive_until(lambda: client.h2.local_flow_control_window(stream) > 0)
        size = min(len(data) - at, client.h2.local_flow_control_window(stream), client.h2.max_outbound_frame_size)
        client.data(stream, data[at : at + size], end=end and at + size == len(data))
        at += size


def test_messages_with_few_bytes_are_not_free(watched):
    """Small messages queue while a stream's handler waits for its client to read; the stream ends at the limit."""
    with contextlib.suppress(OSError), raw.Client(watched.address, settings={INITIAL_WINDOW_SIZE: 0}) as client:
        client.receive_until(lambda: client.h2.max_outbound_frame_size > 16384)
        stream = client.headers(STREAM)
        answer = client.answers[stream]
        for _ in range(80):
            if answer.reset is not None or client.h2.local_flow_control_window(stream) < 50 * KIB:
                break
            client.data(stream, (b"\0\0\0\0\x10" + bytes(16)) * (2 * KIB))
            watched.look()
            client.socket.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                client.receive_until(lambda: answer.reset is not None, 0.001)
    watched.check()
    assert watched.held > 8 * MIB, "messages of few bytes take memory, and the metrics show it"
    watched.forgets()


def test_a_small_part_of_a_large_block_does_not_keep_the_block(watched):
    """Answers of 64 KiB that nobody reads, cut out of requests of 2 MiB each."""
    large, small = np.zeros(2 * MIB, np.uint8), np.zeros(64 * KIB, np.uint8)
    message = framed(request("pair", large, small, outputs=["OUTPUT1"]).SerializeToString())
    clients = [raw.Client(watched.address, settings={INITIAL_WINDOW_SIZE: 0}) for _ in range(2)]
    for client in clients:
        client.receive_until(lambda c=client: c.h2.max_outbound_frame_size > 16384)
        for _ in range(50):
            stream = client.headers(INFER)
            send(client, stream, message)
            client.receive_until(lambda c=client, s=stream: c.answers[s].headers)
    watched.look()
    watched.check()
    assert watched.held >= 100 * 64 * KIB, "all of them wait"
    for client in clients:
        client.socket.close()
    watched.forgets()


def test_framed_output_does_not_keep_the_answer(server, watched):
    """All of an answer of 12 MiB is framed, but the socket does not take the last MiB; there are 16 of these."""
    size = 12 * MIB
    message = framed(request("pair", np.zeros(size, np.uint8), np.zeros(1, np.uint8)).SerializeToString())
    peers = []
    for _ in range(16):
        client = unix_client(server[0].unix)
        peers.append(client)
        stream = client.headers(INFER)
        send(client, stream, message)
        client.receive_until(lambda c=client, s=stream: len(c.answers[s].data) > size - 2560 * KIB)
        watched.look()
    watched.check()
    for client in peers:
        client.socket.close()
    watched.forgets()


def unix_client(path) -> raw.Client:
    """With windows that do not close."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(60)
    connected.connect(path)
    client = raw.Client(connected, settings={INITIAL_WINDOW_SIZE: 2**31 - 1})
    client.h2.increment_flow_control_window(2**30)
    client.flush()
    client.receive_until(lambda: client.h2.max_outbound_frame_size > 16384)
    return client


def test_a_watch_keeps_only_its_name(watched):
    """Not the rest of its request, whose memory would not be counted; a name too long for any service is refused."""
    unknown = b"\x7a" + varint(MIB) + bytes(MIB)  # a field that the message does not have
    message = health_pb2.HealthCheckRequest(service="nobody").SerializeToString() + unknown
    clients = [raw.Client(watched.address) for _ in range(100)]
    for client in clients:
        client.receive_until(lambda c=client: c.h2.max_outbound_frame_size > 16384)
        stream = client.headers(WATCH)
        send(client, stream, framed(message))
        client.receive_until(lambda c=client: c.answers[1].data)  # so no more than one message waits at a time
    held = watched.look()
    assert 100 * KIB < held < 4 * MIB, f"{held} bytes for 100 Watches"
    long = health_pb2.HealthCheckRequest(service="n" * 5000).SerializeToString()
    refused = clients[0].call(WATCH, long)
    assert refused.status == INVALID_ARGUMENT
    assert "at most 4096 bytes" in refused.details
    for client in clients:
        client.socket.close()
    watched.check()


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def test_the_id_of_a_sequence_has_an_end(watched):
    """The server keeps the id as long as the sequence lives."""
    with grpc.insecure_channel(watched.address) as channel:
        stub = Stub(channel)

        def ask(size):
            parameters = {"sequence_id": "s" * size, "sequence_start": True, "sequence_end": True}
            return stub.ModelInfer(request("sequence", np.zeros(1, np.uint8), parameters=parameters))

        ask(4096)
        with pytest.raises(grpc.RpcError) as refused:
            ask(4097)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().endswith("expected a text of at most 4096 bytes, got 4097")


def test_what_is_being_inflated_counts(watched):
    """Each of many clients has one message that inflates to 32 MiB. All are begun, and take turns."""
    message = framed(gzip.compress(bytes(32 * MIB), 9), 1)
    with contextlib.ExitStack() as others:
        clients = []
        for number in range(12):
            client = others.enter_context(raw.Client(watched.address, source=f"127.0.0.{number + 10}"))
            client.receive_until(lambda c=client: c.h2.max_outbound_frame_size > 16384)
            send(client, client.headers(INFER, grpc_encoding="gzip"), message)
            client.socket.settimeout(0.01)
            clients.append(client)
        wait_until(lambda: watched.look() and not poll(clients) and all(c.answers[1].ended for c in clients))
        refused = [client.answers[1] for client in clients if client.answers[1].status == RESOURCE_EXHAUSTED]
        assert refused, "all have been inflated at once"
        assert "more bytes than its limit" in refused[0].details
    watched.check()


def test_connections_of_a_client_are_weighed_together(server, watched):
    """Of a client with many connections, each of which holds little, calls end: not that of another, who holds more
    than any of them."""
    go = server[0].repository / HELD / "go"
    own = np.zeros(2 * MIB, np.float32)  # 8 MiB
    with (
        grpc.insecure_channel(watched.address, options=[("grpc.max_receive_message_length", -1)]) as channel,
        contextlib.ExitStack() as others,
    ):
        waiting = Stub(channel).ModelInfer.future(request("held", own), timeout=100)
        wait_until(lambda: watched.look() > 8 * MIB)
        message = framed(request("held", np.zeros(MIB // 2, np.float32)).SerializeToString())
        clients = []
        for _ in range(60):
            client = others.enter_context(raw.Client(watched.address, source="127.0.0.2"))
            client.receive_until(lambda c=client: c.h2.max_outbound_frame_size > 16384)
            stream = client.headers(INFER)
            send(client, stream, message)
            clients.append(client)
        ended = lambda: sum(client.answers[1].ended for client in clients)  # noqa: E731
        for client in clients:
            client.socket.settimeout(0.01)
        wait_until(lambda: poll(clients) or ended() >= 10, "nobody goes, although there is no room")
        assert {client.answers[1].status for client in clients if client.answers[1].ended} == {RESOURCE_EXHAUSTED}
        watched.look()
        assert not waiting.done()
        go.touch()  # and it stays: requests of the others are executed later
        assert len(output(waiting.result())) == len(own)
    watched.check()


def poll(clients) -> bool:
    for client in clients:
        with contextlib.suppress(TimeoutError):
            client.receive_until(lambda c=client: c.answers[1].ended, 0.01)
    return False
