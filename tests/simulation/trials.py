"""Pieces of the native code that have a door to Python, with input that no client of the simulation sends.

What each answers is found out here a second time: by protobuf, in numpy, or with a model in Python.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inferd._native.protobuf import messages
from inferd._native.shares import Turns
from inferd._native.tensors.classify import classify_tensor
from inferd_client.pb import grpc_service_pb2 as pb
from tests.native import classes
from tests.native.official import check
from tests.simulation.lines import try_evictions, try_lines
from tests.simulation.tried_memory import try_arenas
from tests.simulation.tried_orders import try_alarms, try_full_queues, try_many_turns
from tests.simulation.tried_rules import try_access, try_patterns, try_versions
from tests.simulation.tried_texts import (
    try_deflating,
    try_errors,
    try_hashes,
    try_headers,
    try_index,
    try_inflating,
)
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SHARE = 0.25  # of simulations that have some
TRIALS = 3  # at a time
MESSAGES = 12  # in a trial
VERY_MANY = 300  # elements of one kind: they take more memory than is kept for the next message
TEXTS = ("", "x", "größe", "語", "\U0001f600", "\ud7ff\ue000", "\u0800\uffff", "\U00010000\U0010ffff", "n" * 130)
NO_TEXTS = (b"\x80", b"\xc1\x81", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80")
NO_TEXTS += (b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xe2\x28\xa1", b"\xf0\x90\x28\xbc", b"\xf0\x90\x80\x28", b"a\xffb")
DATATYPES = ("INT64", "BYTES", "FP32", "BOOL", "INT128", "")
NUMBERS = (0, 1, 127, 128, 300, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
KINDS = ("bool_param", "int64_param", "string_param", "double_param", "uint64_param")
VARINT, FIXED64, LENGTH, OPENED, CLOSED, FIXED32 = range(6)
CLIENTS = 80  # of turns: the table of their shares grows
MOST_CLASSES = 1_000_000  # elements of a row


class Trials:
    """Those of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} trials")
        self._on = simulation.has("trials", SHARE, when=True)
        self._kinds: tuple[Callable[[Random], None], ...] = (
            try_requests,
            try_requests,
            try_responses,
            try_classes,
            try_turns,
        )

    def begin(self) -> None:
        """Make those of the start: some in turn by the seed, and then some of them again while memory is refused.

        Raises:
            Violation: an answer is another one.
        """
        seed, world = self._simulation.outcome.seed, self._simulation.world
        if self._simulation.scale.fails_at or self._simulation.scale.crowd:
            return
        for number in range(AT_START):
            trial = IN_TURN[(seed * AT_START + number) % len(IN_TURN)]
            trial(Random(f"{seed} {trial.__name__}"))
            random = Random(f"{seed} {trial.__name__} refused")
            for take in random.sample(range(1, TAKES), REFUSED if trial not in STEADY else 0):
                before, failed = world.may_fail(1), world.failed_takes
                world.fail_at(take, 1)
                try:
                    trial(Random(f"{seed} {trial.__name__} {take}"))
                except (MemoryError, Violation):  # what has not come is missing in the answer
                    if world.failed_takes == failed:
                        raise
                finally:
                    world.fail_at(0, 0)
                    world.may_fail(before)

    def make(self) -> None:
        """Make some.

        Raises:
            Violation: an answer is another one.
        """
        if not self._on:
            return
        for _ in range(TRIALS):
            trial = self._random.choice(self._kinds)
            try:
                trial(self._random)
            except MemoryError:
                if not self._simulation.is_faulty:
                    raise


# Those of the start. What has many lines of native code has several turns.
IN_TURN: tuple[Callable[[Random], None], ...] = ()  # set below
STEADY = (try_full_queues,)  # trials whose probe has no answer to a lack of memory
AT_START = 10  # for each simulation
TAKES, REFUSED = 30, 1  # of the takes of memory of a trial, so many are refused, each in a trial of its own


# -- requests, as bytes that are well formed, nearly well formed, or cut


def try_requests(random: Random) -> None:
    """The server's decoder reads what protobuf reads."""
    decoder = messages.Decoder()
    for _ in range(random.randrange(MESSAGES)):
        data = request_of(random)
        try:
            check(data, decoder if random.random() < 0.5 else None)
        except AssertionError as error:
            raise Violation(f"{data.hex()} is decoded as something else: {error}") from error


def request_of(random: Random) -> bytes:
    """The bytes of a request, or nearly."""
    data = bytearray()
    for _ in range(random.randrange(6)):
        data += random.choice((_text_field, _parameter, _input, _output, _raw, _unknown))(random)
    if random.random() < 0.05:
        part = random.choice((_parameter, _input, _output, _raw))(random)
        data += random.choice((part * VERY_MANY, _sized(5, _sized(3, bytes([1]) * 8 * VERY_MANY, random), random)))
    damage = random.random()
    if data and damage < 0.2:
        del data[random.randrange(len(data)) :]
    elif data and damage < 0.4:
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def _varint(value: int, random: Random | None = None) -> bytes:
    """As few bytes as it needs; with `random` at times more, or more than a number may have."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    if random is not None and random.random() < 0.1:
        out[-1] |= 128
        out += b"\x80" * random.choice((0, 1, 4, 9)) + b"\x00"
    return bytes(out)


def _tag(field: int, wire: int, random: Random) -> bytes:
    return _varint(field << 3 | (random.randrange(8) if random.random() < 0.02 else wire), random)


def _sized(field: int, content: bytes, random: Random) -> bytes:
    length = len(content) + (random.choice((1, -1, 1 << 31)) if random.random() < 0.02 else 0)
    return _tag(field, LENGTH, random) + _varint(max(0, length), random) + content


def _text(random: Random) -> bytes:
    if random.random() < 0.1:
        return random.choice(("", "ok")).encode() + random.choice(NO_TEXTS)
    return "".join(random.choices(TEXTS, k=random.randrange(3))).encode()


def _text_field(random: Random, first: int = 1, last: int = 3) -> bytes:
    return _sized(random.randint(first, last), _text(random), random)


def _unknown(random: Random, deep: int = 0) -> bytes:
    """A field of a later version of the protocol."""
    field = random.choice((9, 15, 16, 1000, (1 << 29) - 1))
    kind = random.choice((VARINT, FIXED32, FIXED64, LENGTH, OPENED))
    if kind == VARINT:
        return _tag(field, kind, random) + _varint(random.choice(NUMBERS), random)
    if kind == LENGTH:
        return _sized(field, bytes(random.randrange(5)), random)
    if kind == OPENED:
        inside = b"".join(_unknown(random, deep + 1) for _ in range(random.randrange(3) if deep < 3 else 0))
        closing = field if random.random() < 0.95 else 11
        return _varint(field << 3 | OPENED) + inside + _varint(closing << 3 | CLOSED)
    return _tag(field, kind, random) + bytes(8 if kind == FIXED64 else 4)


def _value(random: Random) -> bytes:
    """An InferParameter."""
    out = b""
    for _ in range(random.choice((0, 1, 1, 1, 2))):
        kind = random.randrange(6)
        if kind in (0, 1, 4):
            out += _tag((1, 2, 0, 0, 5)[kind], VARINT, random) + _varint(random.choice(NUMBERS), random)
        elif kind == 2:
            out += _text_field(random, 3, 3)
        elif kind == 3:
            out += _tag(4, FIXED64, random) + struct.pack("<d", random.choice((0.0, -0.0, 1.5, math.nan, -math.inf)))
        else:
            out += _unknown(random)
    return out


def _parameter(random: Random, field: int = 4) -> bytes:
    """An entry of a map of parameters."""
    parts = []
    for _ in range(random.choice((1, 1, 1, 2))):
        parts += [_sized(1, _text(random), random), _sized(2, _value(random), random)]
    if random.random() < 0.2:
        parts.append(_unknown(random))
    random.shuffle(parts)
    return _sized(field, b"".join(parts[: random.choice((1, 4, 4, 4))]), random)


def _contents(random: Random) -> bytes:
    """An InferTensorContents: numbers with a tag each, or packed."""
    out = b""
    fields = [random.randint(1, 8)] if random.random() < 0.8 else [random.randint(1, 8) for _ in range(2)]
    for field in fields * random.choice((1, 1, 2)):
        count = random.randrange(4)
        if field == 8:
            out += b"".join(_sized(field, bytes(random.randrange(4)), random) for _ in range(count))
            continue
        wire = {6: FIXED32, 7: FIXED64}.get(field, VARINT)
        size = 4 if wire == FIXED32 else 8
        numbers = [
            _varint(random.choice(NUMBERS), random) if wire == VARINT else random.randbytes(size) for _ in range(count)
        ]
        if random.random() < 0.5:
            packed = b"".join(numbers)
            out += _sized(field, packed[:-1] if packed and random.random() < 0.1 else packed, random)
        else:
            out += b"".join(_tag(field, wire, random) + number for number in numbers)
    return out + (_unknown(random) if random.random() < 0.1 else b"")


def _input(random: Random) -> bytes:
    parts = [_text_field(random, 1, 1), _sized(2, random.choice(DATATYPES).encode(), random)]
    dims = [_varint(random.choice(NUMBERS), random) for _ in range(random.randrange(5))]
    if random.random() < 0.6:
        parts.append(_sized(3, b"".join(dims), random))
    else:
        parts += [_tag(3, VARINT, random) + dim for dim in dims]
    more = (
        lambda: _parameter(random),
        lambda: _sized(5, _contents(random), random),
        lambda: _sized(5, _contents(random), random),
        lambda: _unknown(random),
    )
    parts += [random.choice(more)() for _ in range(random.randrange(4))]
    return _sized(5, b"".join(parts), random)


def _output(random: Random) -> bytes:
    more = (lambda: _parameter(random, 2), lambda: _text_field(random, 1, 1), lambda: _unknown(random))
    return _sized(6, b"".join(random.choice(more)() for _ in range(random.randrange(4))), random)


def _raw(random: Random) -> bytes:
    return _sized(7, bytes(random.choice((0, 1, 127, 128))), random)


# -- responses


def try_responses(random: Random) -> None:
    """Protobuf reads what the server writes."""
    names = ["".join(random.choices(TEXTS, k=random.randrange(3))) for _ in range(3)]
    values: dict[str, object] = {
        "bool_param": random.random() < 0.5,
        "int64_param": random.choice(NUMBERS) - (1 << 63 if random.random() < 0.5 else 0),
        "string_param": random.choice(TEXTS),
        "double_param": random.choice((0.0, -0.0, 1.5, -math.inf)),
        "uint64_param": random.choice(NUMBERS),
    }
    values["int64_param"] = min(int(str(values["int64_param"])), (1 << 63) - 1)
    parameters = {}
    for key in random.sample(TEXTS, random.randrange(4)):
        kind = random.choice(("", *KINDS))
        parameters[key] = (kind, values[kind] if kind else None)
    outputs = [
        (random.choice(TEXTS), random.choice(DATATYPES[:4]), [random.choice(NUMBERS[:8]) for _ in range(rank)])
        for rank in random.choices((0, 1, 2, 6), k=random.randrange(4))
    ]
    raw = [bytes(random.choice((0, 1, 127, 128, 16384))) for _ in range(random.randrange(3))]
    expected = pb.ModelInferResponse(model_name=names[0], model_version=names[1], id=names[2], raw_output_contents=raw)
    for key, (kind, value) in parameters.items():
        expected.parameters[key].SetInParent()
        if kind:
            setattr(expected.parameters[key], kind, value)
    for name, datatype, shape in outputs:
        expected.outputs.add(name=name, datatype=datatype, shape=shape)
    encoded = messages.encode_response(*names, parameters, outputs, raw)
    if pb.ModelInferResponse.FromString(encoded) != expected:
        raise Violation(f"{expected} is written as {encoded.hex()}")
    if len(encoded) != expected.ByteSize():
        raise Violation(f"{expected} is written in {len(encoded)} bytes, where protobuf writes {expected.ByteSize()}")


# -- classes


def try_classes(random: Random) -> None:
    """The highest values of a tensor are those that numpy finds, and are written as Python writes them."""
    datatype = random.choice((*classes.DTYPES, "FP16", "BOOL"))
    rows, elements = random.choice((0, 1, 2, 3)), random.choice((0, 1, 2, 5, 40))
    if datatype not in classes.DTYPES or random.random() < 0.02:
        _refuse_classes(datatype, rows, elements)
        return
    dtype = np.dtype(classes.DTYPES[datatype])
    if random.random() < 0.5:
        few = [0, 1, 3] if dtype.kind == "u" else [0, -1, 2]
        if dtype.kind == "f":
            few += [math.nan, -math.nan, math.inf, -math.inf, -0.0, 1e-300, 2.5]
        else:
            few += [int(np.iinfo(dtype).max), int(np.iinfo(dtype).min)]
        array = np.array([random.choice(few) for _ in range(rows * elements)], dtype)
    else:
        array = np.frombuffer(random.randbytes(rows * elements * dtype.itemsize), dtype)
    array = array.reshape(rows, elements)
    most = random.choice((0, 1, 2, elements, elements + 1, 1000))
    labels = [random.choice(TEXTS) for _ in range(random.choice((0, 1, elements + 1)))]
    found, expected = classes.ours(array, most, labels), classes.texts(array, most, labels)
    if found != expected:
        raise Violation(f"the {most} highest of {array!r} are {found}, where {expected} was expected")


def _refuse_classes(datatype: str, rows: int, elements: int) -> None:
    """Some tensors have no classes: those of other datatypes, and those with very many of them."""
    error, text = (OverflowError, "more than") if datatype in classes.DTYPES else (TypeError, "has no classes")
    size = 1
    if datatype in classes.DTYPES:
        rows, elements = 1, MOST_CLASSES + 1
        size = np.dtype(classes.DTYPES[datatype]).itemsize
    elif datatype == "FP16":
        size = 2
    try:
        classify_tensor(bytes(rows * elements * size), datatype, rows, elements, 1)
    except error as said:
        if text in str(said):
            return
        raise
    raise Violation(f"{rows} x {elements} {datatype} have classes")


# -- turns


def try_turns(random: Random) -> None:
    """A client's turns begin where its last one ended, and no earlier than the latest of anybody."""
    turns, waiting, ends, now = Turns(), dict[int, list[int]](), Counter[int](), 0
    clients = random.choice((2, 5, CLIENTS))
    comes = random.choice((0.3, 0.5, 0.8))
    for number in range(random.choice((20, 300))):
        if random.random() < comes:
            client = random.randrange(clients)
            if not waiting.get(client):
                ends[client] = max(ends[client], now)
            waiting.setdefault(client, []).append(number)
            turns.put(client, (client, number))
        if random.random() < 0.5 and turns.waiting:
            client, taken = turns.take()
            if ends[client] != min(ends[each] for each, its in waiting.items() if its):
                raise Violation(f"client {client} has its turn, and others have had less: {ends}")
            if waiting[client].pop(0) != taken:
                raise Violation(f"client {client} has the turn of call {taken}, and not of its first")
            now = ends[client]
            ends[client] += 1
    if turns.waiting != sum(map(len, waiting.values())):
        raise Violation(f"{turns.waiting} wait for a turn, where {waiting} do")
    if turns.waiting == 0:
        try:
            turns.take()
        except IndexError:
            return
        raise Violation("nobody waits, and somebody has a turn")


IN_TURN = (
    try_lines,
    try_requests,
    try_inflating,
    try_access,
    try_alarms,
    try_lines,
    try_headers,
    try_arenas,
    try_versions,
    try_full_queues,
    try_turns,
    try_lines,
    try_requests,
    try_deflating,
    try_errors,
    try_responses,
    try_lines,
    try_evictions,
    try_hashes,
    try_patterns,
    try_index,
    try_lines,
    try_classes,
    try_many_turns,
    try_arenas,
)
