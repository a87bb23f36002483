"""A gRPC client made of HTTP/2 frames: it can say what no gRPC library would say."""

from __future__ import annotations

import socket
import time

import h2.config
import h2.connection
import h2.events
import h2.settings
from hyperframe.frame import GoAwayFrame

from tests.framing import Answer, framed


class Client:
    """One HTTP/2 connection."""

    def __init__(
        self,
        address: str | socket.socket,
        *,
        settings=None,
        acknowledge_data: bool = True,
        source: str = "",
        at_once: int = 65536,
    ) -> None:
        self._at_once = at_once  # bytes that are read from the socket at a time
        if isinstance(address, str):
            host, port = address.rsplit(":", 1)
            self.socket = socket.create_connection((host, int(port)), timeout=60, source_address=(source, 0))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.socket = address  # it is connected
        # h2 must not keep us from sending wrong headers
        config = h2.config.H2Configuration(
            header_encoding="utf-8",
            normalize_outbound_headers=False,
            validate_outbound_headers=False,
            validate_inbound_headers=True,
        )
        self.h2 = h2.connection.H2Connection(config)
        self.answers: dict[int, Answer] = {}
        self.goaway: GoAwayFrame | None = None  # the last one
        self.pings = 0  # of this client, answered
        self.pinged = 0  # by the server
        self.closed = False
        self._acknowledge_data = acknowledge_data
        # h2 takes GOAWAY for the end of the connection; it only is the end of new streams
        self.h2._frame_dispatch_table[GoAwayFrame] = self._gone_away
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(settings)
        self.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    # ---- sending ----

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def headers(self, path: str, *, without=(), end: bool = False, **replaced) -> int:
        """Open a stream; header names are given with `_` for `-` and `pseudo_` for `:`. Returns its id."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        fields |= {name.replace("pseudo_", ":").replace("_", "-"): value for name, value in replaced.items()}
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [item for item in fields.items() if item[0] not in without], end_stream=end)
        self.answers[stream] = Answer()
        self.flush()
        return stream

    def data(self, stream: int, data: bytes, *, end: bool = False, pad: int | None = None) -> None:
        self.h2.send_data(stream, data, end_stream=end, pad_length=pad)
        self.flush()

    def end(self, stream: int) -> None:
        self.h2.end_stream(stream)
        self.flush()

    def reset(self, stream: int) -> None:
        self.h2.reset_stream(stream, 8)
        self.flush()

    # ---- receiving ----

    def receive_until(self, condition, timeout: float = 60.0) -> None:
        """Take what comes until `condition()` holds or the connection ends."""
        end = time.monotonic() + timeout
        while not condition() and not self.closed:
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                received = self.socket.recv(self._at_once)
                self.closed = not received
                for event in self.h2.receive_data(received):
                    self._handle(event)
                self.flush()
            except (BrokenPipeError, ConnectionResetError):
                self.closed = True

    def answer(self, stream: int, timeout: float = 60.0) -> Answer:
        """The answer on a stream, when the server has ended it."""
        answer = self.answers[stream]
        self.receive_until(lambda: answer.ended or answer.reset is not None, timeout)
        return answer

    def call(self, path: str, message: bytes = b"", **arguments) -> Answer:
        """A whole unary call."""
        stream = self.headers(path, **arguments)
        self.data(stream, framed(message), end=True)
        return self.answer(stream)

    def _gone_away(self, frame):
        self.goaway = frame
        return [], []

    def _handle(self, event):
        if isinstance(event, h2.events.PingAckReceived):
            self.pings += 1
        if isinstance(event, h2.events.PingReceived):
            self.pinged += 1  # h2 answers it
        answer = self.answers.get(getattr(event, "stream_id", None))
        if answer is None:
            return
        answer.note(event)
        if self._acknowledge_data and isinstance(event, h2.events.DataReceived):
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
