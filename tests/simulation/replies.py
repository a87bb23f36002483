"""The replies of a worker to a request, as the protocol has them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inferd.backends.python.worker import protocol as p
from tests.simulation.kind import CLIENTS, USHERED

if TYPE_CHECKING:
    from tests.simulation.instances import Value

INT64 = 9  # DataType of model_config.proto
Y, KEPT_STATE, BESIDE = 0, 1, 1  # outputs
BREAKS = ("rank", "short", "long", "status", "count", "parameters")  # the protocol
WRONG = ("datatype", "shape", "size", "input", "arena", "inline")
STATUS_OF = {  # of errors with these codes
    p.CODE_UNKNOWN: 13,
    p.CODE_INTERNAL: 13,
    p.CODE_NOT_FOUND: 5,
    p.CODE_INVALID_ARG: 3,
    p.CODE_UNAVAILABLE: 14,
    p.CODE_UNSUPPORTED: 12,
    p.CODE_ALREADY_EXISTS: 6,
    p.CODE_CANCELLED: 1,
    99: 13,
}
CODES = tuple(STATUS_OF)
KEYS = ("colour", "Maß", "", "k" * 300)


def code_of(number: int) -> int:
    """The code of the error of this request, where it has one."""
    return CODES[number // 64 % len(CODES)]


@dataclass
class Reply:
    """One response.

    Attributes:
        y: the output; None where there is none.
        beside: another output: its datatype by number, its shape and its bytes; None: there is none.
        state: the new state of its sequence; None: it has none.
        parameters: what is said beside them.
        error: its code and text.
        again: the request is to be executed once more.
        promised: a sender answers.
    """

    y: np.ndarray | None
    state: np.ndarray | None = None
    parameters: dict[str, Value] = field(default_factory=dict)
    error: tuple[int, str] | None = None
    again: bool = False
    promised: bool = False
    beside: tuple[int, tuple[int, ...], bytes] | None = None

    def record(self, base: int, at: int) -> bytes:
        """The reply as it is sent, from `base` of its record on; y lies at `at` of the arena, below 0 in the record."""
        outputs = [(Y, self.y), (KEPT_STATE, self.state)]
        arrays = [(index, INT64, array.shape, array.tobytes()) for index, array in outputs if array is not None]
        arrays += [(BESIDE, *self.beside)] if self.beside is not None else []
        code, message = self.error or (0, "")
        text = message.encode()
        parameters = b"".join(parameter(key, value) for key, value in self.parameters.items())
        size = p.RESPONSE_HEAD.size + sum(p.TENSOR.size + 8 * len(shape) for _, _, shape, _ in arrays)
        begin = p.align(size + len(text) + len(parameters))
        tensors = data = b""
        for index, datatype, shape, content in arrays:
            place, offset = (p.ARENA, at) if index == Y and at >= 0 else (p.INLINE, base + begin + len(data))
            tensors += p.TENSOR.pack(index, datatype, len(shape), place, offset, len(content))
            tensors += struct.pack(f"<{len(shape)}q", *shape)
            data += content if place == p.INLINE else b""
        padding = bytes(begin - size - len(text) - len(parameters))
        return self._head(code, len(arrays), len(text), len(parameters), begin + len(data)) + (
            tensors + text + parameters + padding + data
        )

    def _head(self, code: int, *numbers: int) -> bytes:
        status = p.STATUS_ERROR if self.error else p.STATUS_OK
        if self.again or self.promised:
            status = p.STATUS_RESCHEDULE if self.again else p.STATUS_OPEN
        return p.RESPONSE_HEAD.pack(status, code, *numbers)


def parameter(key: str, value: Value) -> bytes:
    """One parameter of a response."""
    name, text, number = key.encode(), b"", bytes(8)
    if isinstance(value, bool):
        kind, number = p.PARAMETER_BOOL, struct.pack("<q", value)
    elif isinstance(value, str):
        kind, text = p.PARAMETER_STRING, value.encode()
    elif isinstance(value, float):
        kind, number = p.PARAMETER_DOUBLE, struct.pack("<d", value)
    elif value >= 1 << 63:
        kind, number = p.PARAMETER_UINT64, struct.pack("<Q", value)
    else:
        kind, number = p.PARAMETER_INT64, struct.pack("<q", value)
    return p.PARAMETER.pack(len(name), kind, 0, len(text)) + number + name + text


def draw_parameters(random: Random) -> dict[str, Value]:
    """Some, of every type."""
    values: list[Value] = [True, False, -1 << 63, (1 << 64) - 1, 0.1, "", 'say "no"\n', "ü" * 100]
    return {key: random.choice(values) for key in random.sample(KEYS, random.randint(1, len(KEYS)))}


def ushered(number: int) -> dict[str, Value]:
    """What an answer says of the sequence to which this request belongs for steps behind; see `USHERED`."""
    ids: dict[int, Value] = {3: str(number), 5: True}
    what = number // CLIENTS % len(USHERED)
    return {"sequence_id": ids.get(what, number), "sequence_start": 1 if what == 4 else True, "sequence_end": True}


def spoilt(random: Random, record: bytes, reply: Reply, arena: int) -> tuple[bytes, str]:
    """The record of a reply with something wrong in it; what is said of it, empty: its worker is ended.

    Args:
        random: says what is wrong.
        record: of the reply, whose tensors lie in it.
        reply: it has an output.
        arena: bytes that there are.
    """
    assert reply.y is not None
    what, made = random.choice((*BREAKS, *WRONG)), bytearray(record)
    status, code, count, text, parameters, size = p.RESPONSE_HEAD.unpack_from(record)
    place = p.RESPONSE_HEAD.size
    index, datatype, rank, where, offset, bytes_of = p.TENSOR.unpack_from(record, place)
    said = "output 'y' lies where the worker may not put it"
    if what in BREAKS:
        head = {
            "short": (status, code, count, text, parameters, random.randrange(p.RESPONSE_HEAD.size)),
            "long": (status, code, count, text, parameters, size + (1 << 20)),
            "status": (random.choice((4, 255)), code, count, text, parameters, size),
            "count": (status, code, 0xFFFF, text, parameters, size),
            "parameters": (status, code, count, text, size + 1, size),
        }.get(what)
        if head is not None:
            p.RESPONSE_HEAD.pack_into(made, 0, *head)
        rank = random.choice((17, 255)) if what == "rank" else rank
        said = ""
    elif what == "datatype":
        datatype = random.choice((0, 15, 255))
        said = "unexpected datatype"
    elif what == "shape":
        struct.pack_into("<q", made, place + p.TENSOR.size, -1)
        said = "output 'y' has an impossible shape"
    elif what == "size":
        bytes_of -= random.choice((1, 8))
        said = f"output 'y' must have {reply.y.nbytes} bytes of INT64 for its shape, got {bytes_of}"
    elif what == "input":
        where = 1 << 31
    elif what == "arena":
        where, offset = p.ARENA, arena - random.choice((0, 1))
    else:
        offset += random.choice((size, 1 << 40, 1 << 63))
    p.TENSOR.pack_into(made, place, index, datatype, rank, where, offset, bytes_of)
    return bytes(made), said
