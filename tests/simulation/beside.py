"""Another input of a model, `w`, of any datatype, and the output `v`, as which it comes back.

A request may leave it out where it is optional: the model then answers zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from inferd.backends.api import TensorSpec
from tests.simulation.kind import serialize_strings, written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferd._native.execution.python_batch import Batch
    from inferd_client.pb import grpc_service_pb2 as pb

FIELDS = {  # of the contents of a message; others have none
    "BOOL": "bool",
    "UINT8": "uint",
    "UINT16": "uint",
    "UINT32": "uint",
    "UINT64": "uint64",
    "INT8": "int",
    "INT16": "int",
    "INT32": "int",
    "INT64": "int64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}
NUMBERS = {"BOOL": 1, "UINT8": 2, "UINT16": 3, "UINT32": 4, "UINT64": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9}
NUMBERS |= {"FP16": 10, "FP32": 11, "FP64": 12, "BYTES": 13, "BF16": 14}  # of model_config.proto
DATATYPES = tuple(NUMBERS)
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (  # without the batch, and as the model has it
    ((-1,), None),
    ((3,), None),
    ((2, -1), None),
    ((), None),
    ((4,), (2, 2)),
    ((1,), ()),
    ((-1, 2), (2, -1)),
)
VARIANTS = 3  # of what requests with the same question may have here: some of these have nothing
LONGEST = 5  # of a dimension that varies
WRONG = ("rows", "lack", "rest", "bytes", "type", "rank", "empty", "again")


@dataclass(frozen=True)
class Given:
    """What a request has there."""

    shape: tuple[int, ...]
    data: bytes
    values: tuple[Any, ...]  # the elements, for the fields of contents


@dataclass(frozen=True)
class Beside:
    """What the input is like."""

    datatype: str
    optional: bool = False
    dims: tuple[int, ...] = (-1,)
    model_shape: tuple[int, ...] | None = None

    @property
    def field(self) -> str:
        """The field of contents; empty: there is none."""
        name = FIELDS.get(self.datatype, "")
        return f"{name}_contents" if name else ""

    def tensor(self, name: str, *, is_input: bool) -> TensorSpec:
        return TensorSpec(
            name, self.datatype, self.dims, optional=self.optional and is_input, model_shape=self.model_shape
        )

    def draw(self, random: Random, rows: int, batches: bool) -> Given | None:
        """What a request of so many rows has; None: nothing."""
        if self.optional and random.random() < 0.4:
            return None
        own = tuple(random.randint(0 if random.random() < 0.2 else 1, LONGEST) if d < 0 else d for d in self.dims)
        shape = (rows, *own) if batches else own
        values: list[Any]
        if self.datatype == "BYTES":
            values = [written(random.randrange(1 << 16)) for _ in range(prod(shape))]
            return Given(shape, serialize_strings(values), tuple(values))
        most = 2 if self.datatype == "BOOL" else 100
        values = [random.randrange(most) for _ in range(prod(shape))]
        return Given(shape, self.encoded(values), tuple(values))

    def encoded(self, values: Sequence[int]) -> bytes:
        """Numbers as a tensor of this datatype has them; those of BF16 as its bits."""
        return np.array(values, dtype=bits_of(self.datatype)).tobytes()

    def lacking(self, rows: int, batches: bool, *, of_model: bool = False) -> tuple[tuple[int, ...], bytes]:
        """What comes back where nothing was given, in the model's shape or in that of clients."""
        dims = self.model_shape if of_model and self.model_shape is not None else self.dims
        own = tuple(max(1, dim) for dim in dims)
        shape = (rows, *own) if batches else own
        size = 4 if self.datatype == "BYTES" else bits_of(self.datatype).itemsize
        return shape, bytes(size * prod(shape))

    # -- the model's

    def pass_on(self, batch: Batch, random: Random, *, batches: bool, complain: Any) -> None:
        """Give `v` for the whole batch, in one of the ways in which that can be done."""
        if not batch.wants("v") and random.random() < 0.5:
            return
        view = batch.input("w")
        if view is None:
            self._give_nothing(batch, batches=batches)
            return
        shape = self.model_shape if self.model_shape is not None else self.dims
        if (view.datatype, len(view.shape)) != (self.datatype, len(shape) + batches):
            complain(f"w is {view.datatype} {view.shape}, where {self} was expected")
        if self.datatype == "BYTES":
            self._give_strings(batch, view, random)
            if random.random() < 0.2:
                _misuse_strings(batch, view, complain)
            return
        way = random.choice(("view", "array", "copy", "lent", "exchanged"))
        if way == "view":
            batch.set_output("v", view)
        elif way == "lent" and not memoryview(view).readonly:
            batch.set_output("v", Lent(view))
        elif way in ("array", "lent"):
            batch.set_output("v", view.numpy())
        elif way == "copy":
            batch.set_output("v", np.array(view.numpy()))
        elif self.datatype == "BF16":
            batch.set_output("v", np.array(view.numpy()).view(np.uint16))
        else:
            batch.set_output("v", Lent(np.array(view.numpy())))

    def _give_strings(self, batch: Batch, view: Any, random: Random) -> None:
        if random.random() < 0.2:
            batch.set_output("v", view)
            return
        strings = view.strings() if random.random() < 0.5 else view.numpy().reshape(-1).tolist()
        made = random.choice((bytes, bytearray, memoryview, bytes.decode))
        batch.set_bytes_output("v", [made(each) for each in strings], view.shape)

    def _give_nothing(self, batch: Batch, *, batches: bool) -> None:
        shape, _ = self.lacking(batch.rows, batches, of_model=True)
        if self.datatype == "BYTES":
            batch.set_bytes_output("v", [""] * prod(shape), shape)
        else:
            batch.set_output("v", np.zeros(shape, bits_of(self.datatype)))

    # -- the client's

    def put(self, message: pb.ModelInferRequest, given: Given | None) -> None:
        """Have it in the message."""
        if given is None:
            return
        message.inputs.add(name="w", datatype=self.datatype, shape=given.shape)
        message.raw_input_contents.append(given.data)

    def write_out(self, message: pb.ModelInferRequest, given: Given | None) -> None:
        """Have its elements in the field of contents."""
        if given is not None:
            tensor = next(each for each in message.inputs if each.name == "w")
            getattr(tensor.contents, self.field).extend(given.values)

    def spoil(self, random: Random, model: str, most: int, message: pb.ModelInferRequest) -> str:
        """Make the request one that has to be refused; what the refusal has to say, empty: it is as it was.

        Args:
            most: rows of a batch; 0: the model has none.
        """
        tensor = next((each for each in message.inputs if each.name == "w"), None)
        if tensor is None:
            return ""
        if not message.raw_input_contents:
            return self._fill_another(random, model, tensor)
        what, text = random.choice(WRONG), f"input 'w' for model '{model}'"
        place = list(message.inputs).index(tensor)
        if what == "rows" and most and place > 0:  # the bytes of the first input would be found to be too few before
            tensor.shape[0] += 1
            expected, got = (each.shape[0] for each in message.inputs)
            if got > most:
                return f"inference request batch-size must be <= {most} for '{model}', got {got}"
            last = message.inputs[1].name
            return (
                f"input '{last}' batch size does not match other inputs for '{model}', expected {expected}, got {got}"
            )
        if what == "lack" and not self.optional:
            del message.inputs[place]
            del message.raw_input_contents[place]
            return (
                f"expected 2 inputs but got 1 inputs for model '{model}'. Got input(s) ['x'], but missing required "
                "input(s) ['w']. Please provide all required input(s)."
            )
        if what == "rest":
            del message.inputs[1 - place]
            del message.raw_input_contents[1 - place]
            told = "number of inputs between 1 and 2" if self.optional else "2 inputs"
            return (
                f"expected {told} but got 1 inputs for model '{model}'. Got input(s) ['w'], but missing required "
                "input(s) ['x']. Please provide all required input(s)."
            )
        if what == "type":
            tensor.datatype = random.choice([each for each in DATATYPES if each != self.datatype])
            return f"input 'w' data-type is '{tensor.datatype}', but model '{model}' expects '{self.datatype}'"
        if what == "rank":
            tensor.shape.append(1)
            return f"unexpected shape for {text}. Expected "
        if what == "empty":
            del message.raw_input_contents[1]
            return f"unable to find data for input tensor '{message.inputs[1].name}' for model '{model}' in request."
        if what == "again":
            field = self.field or "int_contents"
            getattr(tensor.contents, field).append(b"1" if self.datatype == "BYTES" else 1)
            return f"contents field must not be specified when using raw_input_contents for 'w' for model '{model}'"
        data = message.raw_input_contents[place]
        if self.datatype == "BYTES":
            message.raw_input_contents[place] = data + b"\3"
            elements = prod(tensor.shape)
            return f"unexpected number of string elements {elements + 1} for inference input 'w' for model '{model}'"
        message.raw_input_contents[place] = data + b"\3"
        return f"input byte size mismatch for {text}. Expected {len(data)}, got {len(data) + 1}"

    def _fill_another(self, random: Random, model: str, tensor: Any) -> str:
        """Give the elements in a field for other ones; see `spoil`."""
        if not (self.field and tensor.HasField("contents")):
            return ""
        tensor.ClearField("contents")
        field = random.choice(sorted({f"{name}_contents" for name in FIELDS.values()} - {self.field}))
        getattr(tensor.contents, field).append(b"1" if field == "bytes_contents" else 1)
        return f"unexpected explicit tensor data for input tensor 'w' for model '{model}', expected {self.field}"


def _misuse_strings(batch: Batch, view: Any, complain: Any) -> None:
    """Treat strings as numbers."""
    deeds: tuple[tuple[Any, str], ...] = (
        (
            lambda: batch.set_output("v", np.zeros(view.shape)),
            "output 'v' is BYTES: hand it over with set_bytes_output",
        ),
        (view.__dlpack__, "a BYTES tensor cannot be exchanged by DLPack"),
        (lambda: batch.set_bytes_output("v", [], (1,) * 17), "output 'v' has 17 dimensions, at most 16 are served"),
    )
    for deed, expected in deeds:
        try:
            deed()
        except (ValueError, BufferError) as error:
            if expected not in str(error):
                complain(f"is told '{error}', and not '{expected}'")
        else:
            complain(f"is not told that {expected}")
    if batch.place("v") is not None:
        complain("has a place for strings")


class Lent:
    """A tensor that is exchanged by DLPack alone."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)


def row_of_tensor(given: Given, datatype: str, row: int) -> bytes:
    """One row of it."""
    each = len(given.values) // given.shape[0]
    values = given.values[row * each : (row + 1) * each]
    if datatype == "BYTES":
        return serialize_strings(list(values))
    return np.array(values, dtype=bits_of(datatype)).tobytes()


def bits_of(datatype: str) -> np.dtype[Any]:
    """The type of numpy in which the elements are written; BF16 has that of its bits."""
    names = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2"}
    return np.dtype(names.get(datatype, datatype.lower()))


def beside_of(number: int, *, optional: bool) -> Beside:
    """One of all that there may be, by a number."""
    dims, model_shape = SHAPES[(5 * number + number // len(DATATYPES)) % len(SHAPES)]
    return Beside(DATATYPES[number % len(DATATYPES)], optional, dims, model_shape)
