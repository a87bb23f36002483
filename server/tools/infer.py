"""`inferd infer`: one request, or a few, from the command line."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import inferd_client.grpc as grpcclient
from inferd.server.errors import Misused
from inferd.server.observe.escaping import visible
from inferd.server.tools.reach import Reach, failure
from inferd.server.tools.tensors import Wanted, as_lists, made_up, read, shape_of, shapes_of, shown
from inferd_client.utils import InferenceServerException


@dataclass(frozen=True, slots=True)
class InferArguments:
    """The arguments of a request.

    Attributes:
        model, version: of the model.
        data: see docs/commands.md.
        random: make up inputs that are not given.
        shapes: "INPUT:SIZE,..." of made-up inputs.
        rows: of a made-up batch.
        outputs: names of the wanted outputs; empty: all.
        classes: how many of the likeliest classes are wanted in place of each output; 0: the output itself.
        parameters: "KEY=VALUE" of the request.
        stream: send the request in a stream, which may have any number of responses.
        save: a .npz, .npy or .json file for the response's tensors.
        as_json: print JSON.
    """

    model: str
    version: str = ""
    data: tuple[str, ...] = ()
    random: bool = False
    shapes: tuple[str, ...] = ()
    rows: int = 1
    outputs: tuple[str, ...] = ()
    classes: int = 0
    parameters: tuple[str, ...] = ()
    stream: bool = False
    save: Path | None = None
    as_json: bool = False


def inputs_of(metadata: Any, config: Any) -> list[Wanted]:
    """The inputs of a model."""
    batches = config.max_batch_size > 0
    optional = {tensor.name for tensor in config.input if tensor.optional}
    return [
        Wanted(tensor.name, tensor.datatype, tuple(tensor.shape), batches)
        for tensor in metadata.inputs
        if tensor.name not in optional
    ]


def ask(reach: Reach, arguments: InferArguments) -> None:
    """Send the request, and print the responses.

    Raises:
        CallFailed: the call failed.
        Misused: an argument is wrong.
    """
    with reach.client() as client:
        try:
            _ask(client, reach, arguments)
        except InferenceServerException as error:
            raise failure(reach, error) from None


def _ask(client: grpcclient.InferenceServerClient, reach: Reach, arguments: InferArguments) -> None:
    options: dict[str, Any] = {"headers": reach.metadata, "client_timeout": reach.timeout}
    metadata = client.get_model_metadata(arguments.model, arguments.version, **options)
    config = client.get_model_config(arguments.model, arguments.version, **options).config
    inputs = [
        grpcclient.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)
        for name, datatype, array in _tensors(inputs_of(metadata, config), arguments)
    ]
    names = arguments.outputs or ([tensor.name for tensor in metadata.outputs] if arguments.classes else ())
    request: dict[str, Any] = {
        "model_version": arguments.version,
        "outputs": [grpcclient.InferRequestedOutput(name, arguments.classes) for name in names] or None,
        "parameters": _parameters(arguments.parameters) or None,
    }
    stream = arguments.stream or config.model_transaction_policy.decoupled
    started = time.perf_counter()
    if not stream:
        _tell(client.infer(arguments.model, inputs, **request, **options), arguments, started)
        return
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(
        lambda result, error: answers.put((result, error)), stream_timeout=reach.timeout, headers=reach.metadata
    )
    client.async_stream_infer(arguments.model, inputs, enable_empty_final_response=True, **request)
    while True:
        result, error = answers.get()
        if error is not None:
            raise error
        if result.names:
            _tell(result, arguments, started)
        if not config.model_transaction_policy.decoupled or _is_final(result):
            return


def _is_final(result: grpcclient.InferResult) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def _tensors(wanted: Sequence[Wanted], arguments: InferArguments) -> list[tuple[str, str, Any]]:
    given = read(wanted, arguments.data)
    chance = np.random.default_rng(0)
    shapes = shapes_of(arguments.shapes)
    found = []
    for each in wanted:
        if each.name not in given:
            if not arguments.random:
                raise Misused(
                    f"input '{each.name}' ({each.datatype} {list(each.shape)}) is not given: --data {each.name}=VALUE, "
                    "or --random makes it up"
                )
            given[each.name] = made_up(each, shape_of(each, shapes, arguments.rows), chance, False, 8)
        found.append((each.name, each.datatype, given[each.name]))
    return found


def _parameters(given: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals:
            raise Misused(f"--parameter: expected KEY=VALUE, got {each!r}")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
        if not isinstance(found[key], str | int | float | bool):
            found[key] = value
    return found


def _tell(result: grpcclient.InferResult, arguments: InferArguments, started: float) -> None:
    elapsed = time.perf_counter() - started
    arrays = {name: result.as_numpy(name) for name in result.names}
    if arguments.save is not None:
        _save(arrays, arguments.save)
    if arguments.as_json:
        print(json.dumps({name: as_lists(array) for name, array in arrays.items()}))
        return
    print(visible(f"{result.model_name} version {result.model_version}: {elapsed * 1e3:.2f} ms"))
    for name, array in arrays.items():
        if array is None:
            continue
        if arguments.classes:
            print(visible(f"{name}:"))
            for each in array.ravel():
                value, number, *label = each.decode("utf-8", "replace").split(":", 2)
                print(visible(f"  {number:>6}  {float(value):10.5f}  {label[0] if label else ''}".rstrip()))
            continue
        kind = "BYTES" if array.dtype == np.object_ else array.dtype
        print(visible(f"{name}: {kind} {list(array.shape)}"))
        print("  " + shown(array).replace("\n", "\n  "))


def _storable(array: Any) -> Any:
    """The array for .npy and .npz files: with strings of a fixed size, because numpy would pickle others."""
    if array.dtype != np.object_:
        return array
    if any(each.endswith(b"\0") for each in array.flat):
        raise Misused("--save: .npy and .npz files cannot keep strings that end with a zero byte: save a .json")
    return array.astype(np.bytes_)


def _save(arrays: dict[str, Any], path: Path) -> None:
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps({name: as_lists(array) for name, array in arrays.items()}) + "\n")
        elif path.suffix == ".npy" and len(arrays) == 1:
            np.save(path, _storable(*arrays.values()), allow_pickle=False)
        elif path.suffix == ".npz":
            if taken := {"file", "allow_pickle"} & arrays.keys():
                raise Misused(f"--save: numpy can keep no array named '{min(taken)}' in a .npz file: save a .json")
            np.savez(path, **{name: _storable(array) for name, array in arrays.items()})
        else:
            raise Misused(f"--save {path}: expected .npz, .json, or .npy for a single output")
    except OSError as error:
        raise Misused(f"--save {path}: {error.strerror}") from None
