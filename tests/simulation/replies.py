"""The replies of a worker to a request, as the protocol has them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inferd.backends.python.worker import protocol as p

if TYPE_CHECKING:
    from tests.simulation.instances import Value

INT64 = 9  # DataType of model_config.proto
Y, KEPT_STATE = 0, 1  # outputs
KEYS = ("colour", "Maß", "", "k" * 300)


@dataclass
class Reply:
    """One response.

    Attributes:
        y: the output; None where there is none.
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

    def record(self, base: int, at: int) -> bytes:
        """The reply as it is sent, from `base` of its record on; y lies at `at` of the arena, below 0 in the record."""
        outputs = [(Y, self.y), (KEPT_STATE, self.state)]
        arrays = [(index, array) for index, array in outputs if array is not None]
        code, message = self.error or (0, "")
        text = message.encode()
        parameters = b"".join(parameter(key, value) for key, value in self.parameters.items())
        size = p.RESPONSE_HEAD.size + sum(p.TENSOR.size + 8 * array.ndim for _, array in arrays)
        begin = p.align(size + len(text) + len(parameters))
        tensors = data = b""
        for index, array in arrays:
            place, offset = (p.ARENA, at) if index == Y and at >= 0 else (p.INLINE, base + begin + len(data))
            tensors += p.TENSOR.pack(index, INT64, array.ndim, place, offset, array.nbytes)
            tensors += struct.pack(f"<{array.ndim}q", *array.shape)
            data += array.tobytes() if place == p.INLINE else b""
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
