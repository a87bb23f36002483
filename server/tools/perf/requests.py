"""The messages to send: made up, or from a file as perf_analyzer reads it."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import inferd_client.grpc as grpcclient
from inferd.server.errors import Misused
from inferd.server.tools.perf.plan import LoadPlan
from inferd.server.tools.reach import CallFailed, Reach
from inferd.server.tools.tensors import Wanted, array_of, made_up, read_for, shape_of, shapes_of
from inferd_client._requests import request_pieces
from inferd_client.utils import triton_to_np_dtype

MADE_UP = 16
"""The number of different requests with random content."""
MOST_MADE_UP = 64 << 20  # bytes of all of them


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of a model.

    Attributes:
        inputs: the required ones.
        outputs: (name, datatype, shape) of each.
        batches: whether a request has a batch dimension.
        decoupled: whether a request may have any number of responses.
        sequences: whether requests belong to sequences.
    """

    inputs: tuple[Wanted, ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    batches: bool
    decoupled: bool
    sequences: bool


def model_of(client: grpcclient.InferenceServerClient, reach: Reach, plan: LoadPlan) -> Model:
    """Ask the server about the model.

    Raises:
        InferenceServerException: a call fails.
        Misused: the model cannot have such a batch.
    """
    options: dict[str, Any] = {"headers": reach.metadata, "client_timeout": reach.timeout}
    metadata = client.get_model_metadata(plan.model, plan.version, **options)
    config = client.get_model_config(plan.model, plan.version, **options).config
    batches = config.max_batch_size > 0
    if plan.rows > max(config.max_batch_size, 1):
        raise Misused(f"--batch-size {plan.rows}: model '{plan.model}' takes at most {config.max_batch_size} rows")
    optional = {tensor.name for tensor in config.input if tensor.optional}
    return Model(
        tuple(
            Wanted(each.name, each.datatype, tuple(each.shape), batches)
            for each in metadata.inputs
            if each.name not in optional
        ),
        tuple((each.name, each.datatype, tuple(each.shape)) for each in metadata.outputs),
        batches,
        config.model_transaction_policy.decoupled,
        config.HasField("sequence_batching"),
    )


Tensors = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    """The sent data.

    Attributes:
        tensors: the inputs of each request; the requests are sent in turn.
        expected: the outputs that each must have, by name; empty: any.
    """

    tensors: list[Tensors]
    expected: list[Tensors]


def data_of(model: Model, plan: LoadPlan) -> Data:
    """The tensors to send.

    Raises:
        Misused: the file, or a shape, is wrong.
    """
    if plan.data in ("random", "zero"):
        return Data(_made_up(model, plan), [])
    path = Path(plan.data)
    return Data([_of_folder(model, plan, path)], []) if path.is_dir() else _of_file(model, plan, path)


def _made_up(model: Model, plan: LoadPlan) -> list[Tensors]:
    shapes = shapes_of(plan.shapes)
    chance = np.random.default_rng(1)
    found: list[Tensors] = []
    size = 0
    while len(found) < (1 if plan.data == "zero" else MADE_UP) and size <= MOST_MADE_UP:
        made = {
            each.name: made_up(
                each, shape_of(each, shapes, plan.rows), chance, plan.data == "zero", plan.letters, plan.text
            )
            for each in model.inputs
        }
        found.append(made)
        size += sum(array.nbytes for array in made.values())
    return found


def _of_folder(model: Model, plan: LoadPlan, folder: Path) -> Tensors:
    """A request whose inputs are files with the inputs' names, as in perf_analyzer: the bytes of the tensor, or a line
    for each string."""
    shapes = shapes_of(plan.shapes)
    found: Tensors = {}
    for each in model.inputs:
        path = folder / each.name
        with read_for(f"--input-data {path}"):
            content = path.read_bytes()
            shape = shape_of(each, shapes, plan.rows)
            if each.datatype == "BYTES":
                array = np.empty(len(lines := content.splitlines()), np.object_)
                array[:] = lines
            else:
                array = np.frombuffer(content, triton_to_np_dtype(each.datatype))
            own = shape[1:] if each.batches else shape
            if array.size == np.prod(own) and each.batches:
                array = np.concatenate([array] * plan.rows)  # the file has one row: all rows of the batch are equal
            found[each.name] = array.reshape(shape)
    return found


def _of_file(model: Model, plan: LoadPlan, path: Path) -> Data:
    try:
        document = json.loads(path.read_text())
        steps = document["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Misused(f"--input-data {path}: expected random, zero or a JSON file with 'data': {error}") from None
    if not isinstance(steps, list):
        raise Misused(f"--input-data {path}: expected a list as its 'data'")
    shapes = shapes_of(plan.shapes)
    with read_for(f"--input-data {path}"):
        entries = [{each.name: _tensor(each, step, shapes, path) for each in model.inputs} for step in _flat(steps)]
        outputs = {name: Wanted(name, datatype, shape, model.batches) for name, datatype, shape in model.outputs}
        expected = []
        for step in _flat(document.get("validation_data", [])):
            unknown = set(step) - set(outputs)
            if unknown:
                raise Misused(f"--input-data {path}: validation_data has '{min(unknown)}', which is no output")
            expected.append({name: _tensor(outputs[name], step, {}, path) for name in step})
    if not entries:
        raise Misused(f"--input-data {path}: it has no data")
    if expected and len(expected) != len(entries):
        raise Misused(f"--input-data {path}: {len(entries)} entries of data, but {len(expected)} of validation_data")
    return Data(list(_batches(model, plan, entries, path)), list(_batches(model, plan, expected, path)))


def _flat(steps: Any) -> list[Any]:
    """The steps of all sequences."""
    return list(itertools.chain.from_iterable(steps)) if steps and isinstance(steps[0], list) else steps


def _batches(model: Model, plan: LoadPlan, entries: Sequence[Tensors], path: Path) -> Iterator[Tensors]:
    """For each entry a request: its rows are this entry and those that follow."""
    for i in range(len(entries)):
        if not model.batches:
            yield entries[i]
            continue
        rows = [entries[(i + k) % len(entries)] for k in range(plan.rows)]
        try:
            yield {name: np.stack([row[name] for row in rows]) for name in entries[i]}
        except (KeyError, ValueError) as error:
            raise Misused(f"--input-data {path}: entries of different shapes cannot be a batch: {error}") from None


def _tensor(wanted: Wanted, step: Any, shapes: dict[str, tuple[int, ...]], path: Path) -> Any:
    """A tensor of one entry, without the batch dimension."""
    try:
        content = step[wanted.name]
    except (KeyError, TypeError):
        raise Misused(f"--input-data {path}: an entry lacks input '{wanted.name}'") from None
    own = wanted.shape[1:] if wanted.batches else wanted.shape
    shape: Sequence[int] = shapes.get(wanted.name, own)
    if isinstance(content, dict):
        shape = content.get("shape", shape)
        if "b64" in content:
            raw = base64.b64decode(content["b64"])
            if wanted.datatype == "BYTES":
                return np.array([raw], np.object_).reshape(shape if -1 not in shape else (1,))
            array = np.frombuffer(raw, triton_to_np_dtype(wanted.datatype))
            return array.reshape(shape)
        content = content.get("content", [])
    array = array_of(wanted.datatype, content, wanted.name)
    try:
        return array if len(shape) == array.ndim and -1 in shape else array.reshape(shape)
    except ValueError:
        raise Misused(
            f"--input-data {path}: tensor '{wanted.name}' has {array.size} elements, its shape is {list(shape)}"
        ) from None


Request = tuple[list[grpcclient.InferInput], list[grpcclient.InferRequestedOutput] | None]
"""Inputs, and the requested outputs; None: all."""


class Requests:
    """The requests to send in turn, and their shared memory; a context manager."""

    def __init__(self, client: grpcclient.InferenceServerClient, model: Model, plan: LoadPlan) -> None:
        self._model = model
        self._plan = plan
        self.data = data_of(model, plan)
        self._region: Any = nullcontext()
        if plan.shared:
            self._region = self._shared(client)

    def _shared(self, client: grpcclient.InferenceServerClient) -> AbstractContextManager[Any]:
        arrays: dict[str, Any] = {}
        for i, tensors in enumerate(self.data.tensors):
            arrays |= {f"{i}/{name}": array for name, array in tensors.items()}
        for name, datatype, shape in self._model.outputs:
            if datatype == "BYTES":
                raise Misused(f"--shared-memory: output '{name}' is of strings, which have no place of a fixed size")
            dims = (self._plan.rows, *shape[1:]) if self._model.batches else shape
            kind = np.dtype(triton_to_np_dtype(datatype))
            if any(size < 0 for size in dims):
                dims = (self._plan.output_bytes // kind.itemsize,)
            arrays[f"output/{name}"] = (dims, kind)
        if self._plan.shared == "system":
            return client.shared(arrays)
        try:
            return client.shared(arrays, device=self._plan.device)
        except RuntimeError as error:
            raise Misused(f"--shared-memory cuda: {error}") from None

    def __enter__(self) -> list[Request]:
        try:
            region = self._region.__enter__()
        except RuntimeError as error:
            raise CallFailed(f"--shared-memory {self._plan.shared}: {error}") from None
        if region is None:
            return [(inputs_of(self._model, tensors), None) for tensors in self.data.tensors]
        outputs = [region.output(name, f"output/{name}") for name, _, _ in self._model.outputs]
        return [
            ([region.input(name, f"{i}/{name}") for name in tensors], outputs)
            for i, tensors in enumerate(self.data.tensors)
        ]

    def __exit__(self, *error: Any) -> None:
        self._region.__exit__(*error)


def inputs_of(model: Model, tensors: Tensors) -> list[grpcclient.InferInput]:
    """The inputs of a request with these tensors."""
    return [
        grpcclient.InferInput(each.name, list(tensors[each.name].shape), each.datatype).set_data_from_numpy(
            tensors[each.name]
        )
        for each in model.inputs
    ]


def tensors_of(result: grpcclient.InferResult) -> Tensors:
    """The tensors of a response by name."""
    return {name: result.as_numpy(name) for name in result.names}


def difference(result: grpcclient.InferResult, expected: Tensors) -> str:
    """How a response differs from the expected one; empty if it does not."""
    for name, wanted in expected.items():
        array = result.as_numpy(name)
        if array is None or array.ravel().tolist() != wanted.ravel().tolist():
            shown = "missing" if array is None else str(array.ravel()[:8].tolist())
            return f"output '{name}' is {shown}, validation_data says {wanted.ravel()[:8].tolist()}"
    return ""


def confirmed(
    client: grpcclient.InferenceServerClient, reach: Reach, plan: LoadPlan, requests: Sequence[Request], data: Data
) -> list[bytes] | None:
    """The responses to the requests, from one call each before the run; None: any response is right.

    Raises:
        CallFailed: a response is not as expected.
        InferenceServerException: a call fails.
    """
    if not data.expected:
        return None
    found: list[bytes] = []
    for (inputs, outputs), expected in zip(requests, data.expected, strict=True):
        result = client.infer(
            plan.model,
            inputs,
            plan.version,
            outputs,
            client_timeout=reach.timeout,
            headers=reach.metadata,
            parameters=dict(plan.parameters),
        )
        if wrong := difference(result, expected):
            raise CallFailed(f"--input-data {plan.data}: request {len(found)}: {wrong}")
        found.append(result.as_bytes())
    return found


def serialised(plan: LoadPlan, request: Request) -> bytes:
    """The message of a unary call."""
    inputs, outputs = request
    parameters = dict(plan.parameters)
    pieces = request_pieces(plan.model, inputs, plan.version, outputs, "", 0, False, False, 0, None, parameters)
    return b"".join(bytes(piece) for piece in pieces)[5:]
