"""What clients claim, break off and leave behind, and what of it a real server has in memory then."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import raw
from tests.conformance.client import output, request
from tests.conformance.test_held_bytes import INFER, MODEL
from tests.framing import framed
from tests.observe.scraping import scrape, scraped_server
from tests.waiting import wait_until

MIB = 1 << 20
PATIENCE = 120
"""Seconds for what must happen, but not how fast."""

MAY_BE_OPEN = 1024
"""Calls of a connection, by default."""

MODEL_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each)]) for each in tensors]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(process, address of its metrics)"""
    root = tmp_path_factory.mktemp("claims")
    for name, backend in {"plain": "identity", "python": "python"}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(MODEL.replace("identity", backend).format(extra=""))
    (root / "python" / "1" / "model.py").write_text(MODEL_PY)
    with scraped_server(root, f"--grpc-max-message-size={64 * MIB}") as found:
        yield found


def memory_of(process, field: str) -> int:
    """Bytes, as the kernel counts them."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def held(metrics: str) -> float:
    page = scrape(metrics)
    stages = [page.value("inferd_held_bytes", **labels) for labels in page.labels("inferd_held_bytes")]
    assert all(0 <= stage < 1 << 40 for stage in stages), stages
    return sum(stages)


def ask(address: str, model: str, size: int) -> None:
    """A client whose answer is its request."""
    asked = np.arange(size, dtype=np.float32)
    with raw.Client(address) as client:
        stream = client.headers(INFER)
        send(client, stream, framed(request(model, asked).SerializeToString()))
        [message] = client.answer(stream, PATIENCE).messages
        assert np.array_equal(output(pb.ModelInferResponse.FromString(message)), asked)


def has_room(client, stream, size: int) -> bool:
    return bool(client.h2.local_flow_control_window(stream) >= size)


def send(client, stream, data: bytes) -> None:
    for at in range(0, len(data), 16384):
        piece = data[at : at + 16384]
        client.receive_until(partial(has_room, client, stream, len(piece)), PATIENCE)
        client.data(stream, piece, end=at + 16384 >= len(data))


def test_calls_that_end_while_their_messages_are_inflated(server):
    """Each byte is let go of once, whatever the message was doing when its call ended."""
    process, metrics = server
    message = framed(gzip.compress(request("plain", np.zeros(2 * MIB, np.float32)).SerializeToString()), compressed=1)
    for turn in range(10):
        with raw.Client(process.address) as client:
            streams = [client.headers(INFER, grpc_encoding="gzip") for _ in range(8)]
            for number, stream in enumerate(streams):
                send(client, stream, message)
                if (turn + number) % 3:
                    client.reset(stream)
            held(metrics)
            if turn % 2:
                client.answer(next(each for number, each in enumerate(streams) if (turn + number) % 3 == 0), PATIENCE)
    wait_until(lambda: held(metrics) == 0, "something is held for clients that have left")
    ask(process.address, "plain", MIB)
    wait_until(lambda: held(metrics) == 0, "something is held for clients that have left")


@pytest.mark.parametrize("model", ["plain", "python"])
def test_claims_take_no_memory(server, model):
    """200 calls that announce 60 MB each, name their model, and say no more."""
    process, _ = server
    ask(process.address, model, 200_000)
    address_space, resident = memory_of(process, "VmSize"), memory_of(process, "VmRSS")
    named = b"\x0a" + bytes([len(model)]) + model.encode()
    clients = [raw.Client(process.address) for _ in range(4)]
    for client in clients:
        for stream in [client.headers(INFER) for _ in range(50)]:
            client.data(stream, struct.pack(">BI", 0, 60_000_000) + named)
        client.h2.ping(b"in order")
        client.flush()
        client.receive_until(lambda each=client: each.pings == 1)
    assert memory_of(process, "VmSize") - address_space < 2000 * MIB
    assert memory_of(process, "VmRSS") - resident < 100 * MIB
    ask(process.address, model, 200_000)
    for client in clients:
        client.socket.close()


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x80000000, 100 * MIB])
@pytest.mark.parametrize("path", [INFER, INFER.replace("ModelInfer", "ModelStreamInfer")])
def test_a_message_that_is_too_large_is_refused_when_it_is_announced(server, path, size):
    """Nothing more need come, and the call need not be half-closed."""
    with raw.Client(server[0].address) as client:
        stream = client.headers(path)
        client.data(stream, struct.pack(">BI", 0, size))
        answer = client.answer(stream, PATIENCE)
        assert answer.status == 8
        assert str(size) in answer.details


def test_more_calls_at_once_than_may_be_open(server):
    """Calls begin before the client can know the limit: those beyond it are refused, and the connection stays."""
    message = framed(request("plain", np.zeros(4, np.float32)).SerializeToString())
    encoder = Encoder()
    fields = {":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "localhost"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}

    def begun(stream: int) -> bytes:
        return bytes(HeadersFrame(stream, encoder.encode(fields), flags=["END_HEADERS"]).serialize())

    def rest(stream: int) -> bytes:
        return bytes(DataFrame(stream, message, flags=["END_STREAM"]).serialize())

    with raw.Client(server[0].address) as client:
        client.socket.settimeout(PATIENCE)
        client.socket.sendall(b"".join(map(begun, range(1, 2 * MAY_BE_OPEN + 2000, 2))))
        frames = frames_of(client.socket)
        refused: set[int] = set()
        while len(refused) < 1000:
            frame = next(frames)
            assert not isinstance(frame, GoAwayFrame)
            if isinstance(frame, RstStreamFrame):
                assert frame.error_code == 7, "REFUSED_STREAM: the client may try again"
                refused.add(frame.stream_id)
        assert min(refused) == 2 * MAY_BE_OPEN + 1
        begun_first = range(1, 2 * MAY_BE_OPEN, 2)
        client.socket.sendall(b"".join(map(rest, begun_first)))
        answered: set[int] = set()
        while len(answered) < MAY_BE_OPEN:
            frame = next(frames)
            assert not isinstance(frame, GoAwayFrame | RstStreamFrame)
            if "END_STREAM" in frame.flags:
                answered.add(frame.stream_id)
        assert answered == set(begun_first)
        client.socket.sendall(begun(16_001) + rest(16_001))
        assert next(frame for frame in frames if frame.stream_id == 16_001 and "END_STREAM" in frame.flags)


def frames_of(connection) -> Iterator[Frame]:
    """The frames that the server sends."""
    received = b""
    while True:
        while len(received) < 9:
            received += connection.recv(1 << 16)
        frame, size = Frame.parse_frame_header(memoryview(received[:9]))
        while len(received) < 9 + size:
            received += connection.recv(1 << 16)
        frame.parse_body(memoryview(received[9 : 9 + size]))
        received = received[9 + size :]
        yield frame


def test_memory_goes_back_to_the_system_when_a_peak_is_over(server):
    """The memory of many idle connections, and of responses that no client reads."""
    process, metrics = server
    ask(process.address, "plain", MIB)
    wait_until(lambda: held(metrics) == 0, "something is held for clients that have left")
    before = memory_of(process, "VmRSS")
    clients = [raw.Client(process.address, acknowledge_data=False) for _ in range(600)]
    for client in clients[:60]:
        stream = client.headers(INFER)
        send(client, stream, framed(request("plain", np.zeros(MIB // 4, np.float32)).SerializeToString()))
        client.receive_until(lambda each=client.answers[stream]: each.headers, PATIENCE)
    assert memory_of(process, "VmRSS") > before + 40 * MIB, "the answers wait"
    for client in clients:
        client.socket.close()
    wait_until(lambda: memory_of(process, "VmRSS") < before + 16 * MIB, "memory stays with the server")
