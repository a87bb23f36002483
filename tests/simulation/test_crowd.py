"""Guards the checks of crowds, of which a simulation believes every word: what a server must not send is told of."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation import wire
from tests.simulation.crowd import FIRST, ONCE, ORDERED, Learn, Mood, load

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_000_000_000_000
MS = 1_000_000
PROMPT = 2 * MS  # that an outcome may come behind its deadline
HEADERS = wire.literal(":status", "200") + wire.literal("content-type", "application/grpc")
TRAILERS = wire.literal("grpc-status", "0")
BIT = 3


class House:
    """A crowd with one line and one model, and what a server gives it."""

    def __init__(self, flags: int = 0, window: int = 1 << 20) -> None:
        self.lib = load()
        self._learn = Learn(lambda data, size, index: self._take_block(ctypes.string_at(data, size)))
        self.crowd = self.lib.crowd_new(10, self._learn, 0, 0)
        self.lib.crowd_add_kind(self.crowd, b"twice", flags, 1, 1, 1, 1, BIT)
        self.lib.crowd_add_output(self.crowd, b"y", 2, 0)
        mood = Mood(window=window, conn_window=1 << 20, single_rows=100, usual_widths=100, strict_ns=PROMPT)
        self.line = self.lib.line_new(self.crowd, 0, 7, ctypes.byref(mood))
        self.requests: dict[int, pb.ModelInferRequest] = {}

    @staticmethod
    def _take_block(block: bytes) -> int:
        return 0 if block == TRAILERS else -1

    def ask(self, count: int) -> dict[int, pb.ModelInferRequest]:
        """Begin so many calls; what they say, by stream."""
        assert self.lib.line_ask(self.line, count, NOW, 0) == count
        size = ctypes.c_size_t()
        data = ctypes.string_at(self.lib.line_out(self.line, size), size.value)
        self.lib.line_carried(self.line, size.value, NOW)
        at = len(wire.PREFACE) if data.startswith(wire.PREFACE) else 0
        bodies: dict[int, bytearray] = {}
        while at < len(data):
            length, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            if kind == wire.DATA:
                bodies.setdefault(stream, bytearray()).extend(data[at + 9 : at + 9 + length])
            at += 9 + length
        said = {}
        for stream, body in bodies.items():
            message = wire.take_message(body)
            assert message is not None
            said[stream] = pb.ModelInferRequest.FromString(message)
        self.requests |= said
        return said

    def answer(self, stream: int) -> pb.ModelInferResponse:
        """The right one."""
        request = self.requests[stream]
        x = np.frombuffer(request.raw_input_contents[0], np.int64).reshape(request.inputs[0].shape)
        y = np.concatenate([x[:, :1], 2 * x[:, 1:]], axis=1)
        response = pb.ModelInferResponse(model_name="twice", model_version="1", id=request.id)
        response.outputs.add(name="y", datatype="INT64", shape=y.shape)
        response.raw_output_contents.append(y.tobytes())
        return response

    def frames(self, stream: int, response: pb.ModelInferResponse | None = None) -> list[bytes]:
        """HEADERS, DATA and trailers."""
        data = wire.framed((response or self.answer(stream)).SerializeToString())
        return [
            wire.frame(wire.HEADERS, wire.END_HEADERS, stream, HEADERS),
            wire.frame(wire.DATA, 0, stream, data),
            wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, stream, TRAILERS),
        ]

    def take(self, *frames: bytes, after_ns: int = 0) -> str:
        """What the crowd finds wrong with them; a count of calls that are over, if nothing."""
        data = b"".join(frames)
        over = self.lib.line_receive(self.line, data, len(data), NOW + after_ns, 0, 0)
        return str(self.lib.crowd_problem(self.crowd).decode()) if over < 0 else str(over)


def test_right_answers_are_taken_however_they_are_cut():
    """Guards the sound case, without which the others would say nothing."""
    house = House()
    streams = list(house.ask(5))
    data = b"".join(frame for stream in reversed(streams) for frame in house.frames(stream))
    assert sum(int(house.take(data[at : at + 7])) for at in range(0, len(data), 7)) == len(streams)


def spoilt(response: pb.ModelInferResponse, how: str) -> pb.ModelInferResponse:
    numbers = np.frombuffer(response.raw_output_contents[0], np.int64).copy()
    if how == "number":
        numbers[-1] += 1
    elif how == "request":
        response.id = str(FIRST + 9)
    elif how == "model":
        response.model_name = "once"
    elif how == "shape":
        response.outputs[0].shape[1] += 1
    elif how == "datatype":
        response.outputs[0].datatype = "UINT64"
    elif how == "output":
        response.outputs[0].name = "z"
    elif how == "less":
        numbers = numbers[:-1]
    response.raw_output_contents[0] = numbers.tobytes()
    if how == "more":
        response.raw_output_contents.append(b"")
    return response


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("number", "was expected, at"),
        ("request", "the answer of request"),
        ("model", "the answer of another model"),
        ("shape", "has shape"),
        ("datatype", "has another datatype"),
        ("output", "has the name 'z'"),
        ("less", "bytes of numbers"),
        ("more", "1 outputs and 2 tensors"),
    ],
)
def test_a_wrong_answer_is_found(how, told):
    house = House()
    stream = next(one for one, request in house.ask(8).items() if request.id)
    assert told in house.take(*house.frames(stream, spoilt(house.answer(stream), how)))


def test_the_answer_of_another_request_is_found():
    """Such a fault gives each request of a batch the first one's part."""
    house = House()
    one, other = [stream for stream, request in house.ask(10).items() if list(request.inputs[0].shape) == [1, 4]][:2]
    response = house.answer(one)
    response.id = house.requests[other].id
    assert "was expected, at" in house.take(*house.frames(other, response))


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (lambda f, s: [f[1]], "DATA before HEADERS"),
        (lambda f, s: [f[0], f[1], f[2], f[2]], "which has ended"),
        (lambda f, s: [f[0], f[0]], "second HEADERS"),
        (lambda f, s: [f[0], f[1], f[1], f[2]], "not one message"),
        (lambda f, s: [f[0], f[2]], "not one message"),
        (lambda f, s: [f[0], wire.frame(wire.DATA, wire.END_STREAM, s, b"")], "without trailers"),
        (lambda f, s: [wire.frame(wire.HEADERS, wire.END_HEADERS, 99, HEADERS)], "which does not exist"),
        (lambda f, s: [wire.frame(wire.RST_STREAM, 0, 2, struct.pack(">I", 8))], "which does not exist"),
        (lambda f, s: [wire.frame(wire.HEADERS, 0, s, HEADERS), f[1]], "within a header block"),
        (lambda f, s: [wire.frame(wire.PUSH, 0, s, bytes(4))], "a frame of type 5"),
    ],
)
def test_frames_that_none_may_send_are_found(frames, told):
    house = House()
    stream = next(iter(house.ask(1)))
    assert told in house.take(*frames(house.frames(stream), stream))


def test_more_than_the_window_is_found():
    """The window of a stream counts once the server has acknowledged it."""
    house = House(window=64)
    stream = next(iter(house.ask(1)))
    assert "window of its stream" in house.take(wire.frame(wire.SETTINGS, wire.ACK, 0, b""), *house.frames(stream))


def test_an_answer_that_is_late_is_found():
    house = House()
    mood = Mood(
        window=1 << 20,
        conn_window=1 << 20,
        single_rows=100,
        usual_widths=100,
        strict_ns=PROMPT,
        has_deadlines=1,
        hurried=1,
    )
    house.line = house.lib.line_new(house.crowd, 1, 7, ctypes.byref(mood))
    streams = list(house.ask(10))
    after = 2 * MS + PROMPT + 1  # the longest deadline but for one of an hour
    found = [house.take(*house.frames(stream), after_ns=after) for stream in streams]
    assert any("after its deadline" in one for one in found)


def test_answers_in_another_order_are_found():
    """Where the order is promised: that of the calls of a line."""
    house = House(ORDERED)
    first, second = house.ask(2)
    assert house.take(*house.frames(second)) == "1"
    assert "answered after a later one" in house.take(*house.frames(first))


def test_what_is_executed_twice_or_never_is_found():
    house = House(ONCE)
    first, second = house.ask(2)
    numbers = (ctypes.c_int64 * 1)(FIRST)
    assert house.lib.crowd_executed(house.crowd, BIT, 1, numbers, 1)
    assert house.take(*house.frames(first)) == "1"
    assert "never executed" in house.take(*house.frames(second))
    assert not house.lib.crowd_executed(house.crowd, BIT, 1, numbers, 1)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        ({"lies": True}, "was expected, at"),
        (
            {"forgetful": True, "cancels": False, "faults": False, "fixed": {"receive timeout": 0}},
            "answered for 900 s: call",
        ),
    ],
    ids=["lies", "forgetful"],
)
def test_a_crowd_alone_finds_what_is_broken(scale, told):
    """A crowd that takes one right answer for a wrong one, and one whose last call can have no answer."""
    alone = {"clients": 0, "crowd": 400, "models": ["plain"], "operator": False, "deadlines": False, **scale}
    command = [sys.executable, "-m", "tests.simulation", "--seed", "1", "--scale", json.dumps(alone)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert told in done.stdout.splitlines()[-1]
