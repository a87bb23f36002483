"""inferd_client with servers of other makes: any frames that HTTP/2 allows, and some that it does not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import socket
import struct
import threading
from concurrent import futures

import hpack
import numpy as np
import pytest
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame, WindowUpdateFrame

import inferd_client.grpc as grpcclient
import inferd_client.grpc.aio as aioclient
from inferd_client.pb import grpc_service_pb2 as pb
from inferd_client.utils import InferenceServerException

PREFACE = 24
WINDOW = (1 << 31) - 1 - 65_535
MOST = 1 << 20  # bytes of a frame that the client takes
FIRST = [(":status", "200"), ("content-type", "application/grpc")]
LAST = [("grpc-status", "0")]


class Peer:
    """Answers on each connection when `together` requests are there, by what `answer` says of their ids.

    Args:
        response: gets the streams and ids of requests, oldest first, and the function that encodes headers; returns the
            bytes to send. Its connections stay open until the client closes them.
    """

    def __init__(self, response, together: int = 1) -> None:
        self._response, self._together = response, together
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.bodies = []  # of the requests, as they came
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near):
        taken = near.makefile("rb")
        headers, bodies, waiting = hpack.Encoder(), {}, []
        with near, contextlib.suppress(OSError):
            near.sendall(SettingsFrame(0).serialize() + WindowUpdateFrame(0, window_increment=WINDOW).serialize())
            taken.read(PREFACE)
            while head := taken.read(9):
                frame, size = Frame.parse_frame_header(memoryview(head))
                frame.parse_body(memoryview(taken.read(size)))
                if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
                    near.sendall(SettingsFrame(0, flags=["ACK"]).serialize())
                if isinstance(frame, DataFrame):
                    bodies[frame.stream_id] = bodies.get(frame.stream_id, b"") + frame.data
                    if "END_STREAM" in frame.flags:
                        body = bodies.pop(frame.stream_id)
                        self.bodies.append(body)
                        asked = pb.ModelInferRequest.FromString(gzip.decompress(body[5:]) if body[0] else body[5:])
                        waiting.append((frame.stream_id, asked.id))
                if len(waiting) == self._together:
                    near.sendall(self._response(waiting, lambda fields: headers.encode(fields)))
                    waiting = []


@contextlib.contextmanager
def peer(response, together=1):
    running = Peer(response, together)
    try:
        yield running
    finally:
        running.close()


def begun(stream, encode, last=False):
    frame = HeadersFrame(stream, data=encode(LAST if last else FIRST), flags=["END_HEADERS"])
    if last:
        frame.flags.add("END_STREAM")
    return frame.serialize()


def content(number, size):
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def message(number, size):
    output = pb.ModelInferResponse.InferOutputTensor(name="Y", datatype="UINT8", shape=[size])
    response = pb.ModelInferResponse(
        id=str(number), outputs=[output], raw_output_contents=[content(number, size).tobytes()]
    )
    whole = response.SerializeToString()
    return b"\0" + struct.pack(">I", len(whole)) + whole


def frames(stream, whole, chance):
    """DATA frames of any sizes, some padded."""
    sizes = chance.choice([(1, 2, 3, 5, 6, 40_000), (16_384, 32_767, 32_768, 32_769), (MOST,), (70_000, 3, MOST, 100)])
    found, at = [], 0
    while at < len(whole):
        frame = DataFrame(stream)
        if chance.random() < 0.2:
            frame.flags.add("PADDED")
            frame.pad_length = chance.choice([0, 1, 255])
        frame.data = whole[at : at + min(chance.choice(sizes), MOST - 256)]
        at += len(frame.data)
        found.append(frame.serialize())
    return found


SIZES = (0, 1, 100, 16_000, 32_768, 33_000, 65_530, 100_000, 1_000_000)


def test_responses_in_any_frames():
    """Guards that each response has its own bytes, however the frames of several are cut, padded and mixed."""
    chance = random.Random(7)
    sizes = {number: max(0, chance.choice(SIZES) + chance.randint(-30, 30)) for number in range(120)}

    def response(asked, encode):
        sent = [begun(stream, encode) for stream, _ in asked]
        left = [(stream, frames(stream, message(int(number), sizes[int(number)]), chance)) for stream, number in asked]
        while left:
            each = chance.choice(left)
            sent.append(each[1].pop(0))
            if not each[1]:
                left.remove(each)
                sent.append(begun(each[0], encode, last=True))
        return b"".join(sent)

    with peer(response, together=4) as running, grpcclient.InferenceServerClient(running.url) as client:
        with futures.ThreadPoolExecutor(4) as pool:
            results = pool.map(lambda number: client.infer("m", [], request_id=str(number)), sizes)
            for number, result in zip(sizes, results, strict=True):
                assert np.array_equal(result.as_numpy("Y"), content(number, sizes[number])), number
        assert running.connections == 1


@pytest.mark.parametrize(
    ("encoding", "damage"),
    [((), bytes), ([("grpc-encoding", "identity")], bytes), ([("grpc-encoding", "gzip")], lambda packed: packed[:-9])],
)
def test_responses_that_are_not_compressed_as_they_say(encoding, damage):
    """Guards that the client tells them from responses: a flag without an encoding, and data without their end."""

    def response(asked, encode):
        stream, _ = asked[0]
        packed = damage(gzip.compress(message(1, 100_000)[5:]))
        head = HeadersFrame(stream, data=encode([*FIRST, *encoding]), flags=["END_HEADERS"]).serialize()
        body = frames(stream, b"\1" + struct.pack(">I", len(packed)) + packed, random.Random(1))
        return head + b"".join(body) + begun(stream, encode, last=True)

    with peer(response) as running, grpcclient.InferenceServerClient(running.url) as client:
        with pytest.raises(InferenceServerException, match="compressed") as raised:
            client.infer("m", [])
        assert raised.value.status() == "StatusCode.INTERNAL"


@pytest.mark.parametrize(
    ("options", "told"), [({}, 4), ({"compression_level": "medium"}, 0), ({"compression_level": "high"}, 2)]
)
def test_requests_are_compressed_with_the_level_of_the_client(options, told):
    """Guards compression_level and its default, the quickest. A byte of gzip's header tells the level."""

    def response(asked, encode):
        (stream, _), whole = asked[0], message(0, 1)
        return b"".join(
            (begun(stream, encode), *frames(stream, whole, random.Random(1)), begun(stream, encode, last=True))
        )

    async def ask(url):
        async with aioclient.InferenceServerClient(url, **options) as client:
            await client.infer("m", [], compression_algorithm="gzip")

    with peer(response) as running:
        with grpcclient.InferenceServerClient(running.url, **options) as client:
            client.infer("m", [], compression_algorithm="gzip")
        asyncio.run(ask(running.url))
        assert [body[5 + 8] for body in running.bodies] == [told, told]


@pytest.mark.parametrize("module", [grpcclient, aioclient])
def test_a_level_that_there_is_not_is_refused(module):
    with pytest.raises(InferenceServerException, match="compression_level: expected low, medium, high, got 'best'"):
        module.InferenceServerClient("localhost:1", compression_level="best")


def over_long(asked, encode):
    """A frame longer than the client's settings allow."""
    return begun(asked[0][0], encode) + struct.pack(">I", MOST + 1)[1:] + bytes([0, 0]) + struct.pack(">I", asked[0][0])


def of_nobody(asked, encode):
    """Data on a stream that nobody has opened."""
    return begun(asked[0][0], encode) + DataFrame(99_999, b"x").serialize()


def no_frames(asked, encode):
    """Bytes that are no HTTP/2."""
    return bytes(range(256)) * 8


@pytest.mark.parametrize("fault", [over_long, of_nobody, no_frames])
def test_a_server_that_breaks_the_protocol_and_stays(fault):
    """Guards against calls without a deadline that wait for ever: the connection ends, the next call gets another."""

    def response(asked, encode):
        stream, number = asked[0]
        if number == "broken":
            return fault(asked, encode)
        return (
            begun(stream, encode)
            + b"".join(frames(stream, message(1, 10), random.Random(1)))
            + begun(stream, encode, True)
        )

    def failed(ended):
        with pytest.raises(InferenceServerException) as raised:
            ended()
        assert raised.value.status() == "StatusCode.UNAVAILABLE"

    def called_back(client):
        ended = futures.Future()
        client.async_infer("m", [], lambda result, error: ended.set_result(error), request_id="broken")
        raise ended.result(60)

    async def in_a_loop(url):
        async with aioclient.InferenceServerClient(url) as client:
            with pytest.raises(InferenceServerException):
                await client.infer("m", [], request_id="broken")
            assert (await client.infer("m", [], request_id="1")).id == "1"

    with peer(response) as running:
        with grpcclient.InferenceServerClient(running.url) as client:
            failed(lambda: client.infer("m", [], request_id="broken"))
            assert client.infer("m", [], request_id="1").id == "1"
            failed(lambda: called_back(client))
            assert client.infer("m", [], request_id="1").id == "1"
        asyncio.run(asyncio.wait_for(in_a_loop(running.url), 60))
        assert running.connections == 5
