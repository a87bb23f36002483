"""A connection without sockets: the h2 library as the client, `inferd._native.transport.connection` as the server,
joined in memory.

`Lanes` puts native ModelInfer behind an endpoint, again without sockets and without an event loop.
"""

from __future__ import annotations

import select
import threading

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from inferd._native.execution.instance import InstanceLoop
from inferd._native.request.bridge import BridgeHandle
from inferd._native.scheduling.queue import QueueLane
from inferd._native.service.infer import InferService
from inferd._native.service.table import ModelTable
from inferd._native.transport.call import EVENT_HALF_CLOSE, EVENT_MESSAGE, Call
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd.backends.api import BatchingSpec, ModelSpec, TensorSpec
from inferd.backends.identity import IdentityInstance
from inferd_client.pb import grpc_service_pb2 as pb
from tests.framing import Answer, framed

INFER = "/inference.GRPCInferenceService/ModelInfer"


class Peer:
    """One client connection.

    Args:
        endpoint: of the server.
        window: what the client lets the server send ahead on each stream.
        reading: acknowledge what comes, so that more may come.
    """

    def __init__(self, endpoint: Endpoint, *, window: int = 65_535, reading: bool = True) -> None:
        self.connection = Connection(endpoint, "test")
        self.connection.flush = lambda: None
        self.reading = reading
        self.answers: dict[int, Answer] = {}
        self.events: list[h2.events.Event] = []
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.h2.initiate_connection()

    # -- bytes --

    def feed(self, data: bytes, step: int | None = None) -> None:
        """Give bytes to the server, at most `step` at a time."""
        step = step or len(data) or 1
        for at in range(0, len(data), step):
            self.connection.receive(data[at : at + step])

    def take(self, limit: int = 1 << 20) -> bytes:
        return b"".join(bytes(piece) for piece in self.connection.take_output(limit))

    def pump(self) -> None:
        """Exchange bytes until both sides are silent."""
        while True:
            sent = self.h2.data_to_send()
            self.feed(sent)
            got = self.take()
            if not sent and not got:
                return
            self.read(got)

    def read(self, data: bytes) -> None:
        """Give bytes of the server to the client."""
        for event in self.h2.receive_data(data):
            self.events.append(event)
            self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        if not hasattr(event, "stream_id"):
            return
        answer = self.answers.get(event.stream_id)
        if answer is None:
            return
        answer.note(event)
        if self.reading and isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    # -- calls --

    def open(self, path: str = INFER, metadata: tuple[tuple[str, str], ...] = (), end: bool = False) -> int:
        """Send the headers of a call; its stream."""
        stream = self.h2.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        headers += [("content-type", "application/grpc"), ("te", "trailers"), *metadata]
        self.h2.send_headers(stream, headers, end_stream=end)
        self.answers[stream] = Answer()
        return stream

    def send(self, stream: int, data: bytes, end: bool = False) -> int:
        """Queue as much of the data as flow control allows; the number of bytes."""
        at = 0
        while at < len(data):
            part = min(len(data) - at, self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if part == 0:
                return at
            self.h2.send_data(stream, data[at : at + part], end_stream=end and at + part == len(data))
            at += part
        return at

    def send_all(self, stream: int, data: bytes, end: bool = True) -> None:
        """Send all of the data, exchanging bytes wherever flow control asks for it."""
        at = 0
        while at < len(data):
            sent = self.send(stream, data[at:], end)
            at += sent
            self.pump()
            assert sent or self.h2.local_flow_control_window(stream), "flow control lets nothing through"

    def call(self, path: str, *messages: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> Answer:
        """A whole call whose answer comes at once."""
        stream = self.open(path, metadata, end=not messages)
        if messages:
            self.send_all(stream, b"".join(framed(message) for message in messages))
        self.pump()
        return self.answers[stream]

    def close(self) -> None:
        self.connection.close()


class Echo:
    """Python calls: each message comes back, the end comes back; `hold` keeps messages where they are."""

    def __init__(self, **limits: int) -> None:
        self.endpoint = Endpoint(self._on_call, **limits)
        self.calls: list[Call] = []
        self.events: list[tuple[int, str]] = []  # (index of the call, kind)
        self.hold = False

    def _on_call(self, call: Call) -> None:
        index = len(self.calls)
        self.calls.append(call)

        def on_event(kind: str) -> None:
            self.events.append((index, kind))
            if not self.hold and kind in (EVENT_MESSAGE, EVENT_HALF_CLOSE):
                self.answer(call)

        call.on_event = on_event

    def answer(self, call: Call) -> None:
        while call.open and (message := call.take_message()) is not None:
            call.send_message(message)
        if call.half_closed and call.open:
            call.end(0, metadata=call.metadata)


class Clock:
    """Seconds that pass when they are told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lanes:
    """Native ModelInfer of one identity model `m`, INPUT to OUTPUT, UINT8 [-1, -1]."""

    def __init__(self, *, delay_ns: int = 0, instances: int = 1, running: bool = True, **limits: int) -> None:
        self.spec = ModelSpec(
            "m",
            "identity",
            max_batch_size=8,
            inputs=(TensorSpec("INPUT", "UINT8", (-1,)),),
            outputs=(TensorSpec("OUTPUT", "UINT8", (-1,)),),
            batching=BatchingSpec(),
        )
        self.table = ModelTable()
        self.bridge = BridgeHandle()
        self.service = InferService(self.table, self.bridge)
        self.calls: list[Call] = []
        self.endpoint = Endpoint(self.calls.append, **limits)
        self.service.install(self.endpoint)
        self.lane = QueueLane(self.spec, 1)
        self.table.set("m", {1: self.lane})
        self.threads = [self._instance(delay_ns, index) for index in range(instances)]
        if running:
            self.run()

    def _instance(self, delay_ns: int, index: int) -> threading.Thread:
        loop = InstanceLoop(self.lane, IdentityInstance((delay_ns // 1000, 0), False, False), f"m_{index}")
        return threading.Thread(target=loop.run)

    def run(self) -> None:
        """Start the instances."""
        for thread in self.threads:
            thread.start()

    def settle(self) -> None:
        """Wait for everything in flight and deliver it."""
        while self.lane.in_flight:
            assert select.select([self.bridge.event_fd], [], [], 30)[0], "an answer is missing"
            self.bridge.drain()
        self.bridge.drain()
        self.endpoint.flush_dirty()

    def request(self, data: bytes, request_id: str = "") -> bytes:
        message = pb.ModelInferRequest(model_name="m", id=request_id, raw_input_contents=[data])
        message.inputs.add(name="INPUT", datatype="UINT8", shape=[1, len(data)])
        return message.SerializeToString()

    def close(self) -> None:
        if not hasattr(self, "lane"):
            return
        self.lane.close()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        self.settle()
        self.table.remove("m")
        del self.lane, self.threads  # pytest keeps fixtures' values until all of them are torn down


def output(message: bytes) -> tuple[str, bytes]:
    """(id, data) of an encoded response of `Lanes`."""
    response = pb.ModelInferResponse.FromString(message)
    return response.id, response.raw_output_contents[0]
