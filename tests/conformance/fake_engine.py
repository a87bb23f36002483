"""An engine in plain Python with official protobuf: doors are tested without the native one, and it is the oracle.

It serves the models of `tests.conformance.models`. Texts follow the same rules as the native engine's but are written
independently of them; the suite compares both with what it expects.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import time

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from inferd.backends.api import ModelSpec
from inferd.server.engine.instances.shared_memory import SharedMemory
from inferd.server.engine.models.registry import IndexEntry
from inferd.server.errors import Internal, InvalidArgument, NotFound, ServerError, Status, Unavailable, Unimplemented
from inferd.server.pb import grpc_service_pb2 as pb
from inferd.server.pb import model_config_pb2 as config_pb
from tests.conformance import models

CONTROL = "conformance.Control"
NO_CONTROL = "explicit model load / unload is not allowed if polling is enabled"

_FIXED = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1", "INT16": "i2",
    "INT32": "i4", "INT64": "i8", "FP16": "f2", "BF16": "u2", "FP32": "f4", "FP64": "f8",
}  # fmt: skip
_CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_PARAMETERS = {
    "sequence_id": (("int64_param", "string_param"), "int64_param or string_param"),
    "sequence_start": (("bool_param",), "bool_param"),
    "sequence_end": (("bool_param",), "bool_param"),
    "priority": (("int64_param", "uint64_param"), "int64_param >= 0 or uint64_param"),
    "timeout": (("int64_param",), "int64_param"),
    "triton_enable_empty_final_response": (("bool_param",), "bool_param"),
}
_FREE = ("bool_param", "int64_param", "string_param", "double_param")


class Loaded:
    """A version of a model."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        self.name = spec.name
        self.version = version
        self.spec = spec
        self.config = _config(spec)
        self.ready = True
        self._successes = self._failures = self._rows = self._last_ms = 0

    async def check(self) -> bool:
        return self.ready

    def statistics(self) -> pb.ModelStatistics:
        statistics = pb.ModelStatistics(name=self.name, version=str(self.version), last_inference=self._last_ms)
        statistics.inference_count = self._rows
        statistics.execution_count = self._successes
        for duration in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            getattr(statistics.inference_stats, duration).count = self._successes
        statistics.inference_stats.fail.count = self._failures
        return statistics

    def executed(self, rows: int) -> None:
        self._successes += 1
        self._rows += rows
        self._last_ms = time.time_ns() // 1_000_000


class Ticket:
    """A submitted request."""

    reason = ""
    decoupled = False
    done = False

    def __init__(self, engine: FakeEngine, deliver) -> None:
        self._engine = engine
        self._deliver = deliver
        self._timers: list[asyncio.TimerHandle] = []
        engine.live_requests += 1

    def at(self, delay_s: float, status: Status, details: str, response: bytes | None) -> None:
        """Deliver this after a delay, unless something else ends the request before."""
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, self._end, status, details, response))

    def taken(self) -> None:
        pass

    def cancel(self) -> None:
        if self._timers:
            self._clear()

    def _end(self, status, details, response):
        self._clear()
        self.done = True
        self._deliver(int(status), details, response)

    def _clear(self):
        self._engine.live_requests -= 1
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


class FakeEngine:
    """`inferd.server.engine.engine.Engine`, as far as the doors and the handlers use it."""

    def __init__(self, *, broken: bool = False) -> None:
        self.live = True
        self._broken = broken
        self.live_requests = 0
        self._subscribers: list = []
        self.shared_memory = SharedMemory()
        self._models = {
            spec.name: {version: Loaded(spec, version) for version in models.versions(spec.name)}
            for spec in models.MODELS.values()
        }

    on_demand = ()

    def is_awaited(self, name: str) -> bool:
        return False

    async def is_on_demand(self, name: str) -> bool:
        return False

    async def bring(self, name: str) -> None:
        """Nothing is loaded on demand."""

    @property
    def ready(self) -> bool:
        return not self._broken and all(
            loaded.ready for versions in self._models.values() for loaded in versions.values()
        )

    def subscribe(self, callback) -> None:
        self._subscribers.append(callback)

    def set_ready(self, name: str, version: int, ready: bool) -> None:
        self._models[name][version].ready = ready
        for callback in self._subscribers:
            callback(name, version, ready)

    def versions(self, name: str) -> tuple[Loaded, ...]:
        if self._broken and name == models.BROKEN:
            return ()
        if name not in self._models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return tuple(loaded for loaded in self._models[name].values() if loaded.ready)

    def model(self, name: str, version: str = "") -> Loaded:
        number = _version_number(version)
        ready = self.versions(name)
        if number == -1:
            if not ready:
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            return ready[-1]
        known = self._models.get(name, {})
        if number not in known:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if not known[number].ready:
            raise Unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        return known[number]

    async def check(self):
        return self.ready

    @property
    def names(self) -> list[str]:
        return sorted({entry.name for entry in self.index()})

    def index(self) -> list[IndexEntry]:
        entries = [
            IndexEntry(name, str(version), "READY" if loaded.ready else "UNAVAILABLE", "" if loaded.ready else "set")
            for name, versions in self._models.items()
            for version, loaded in versions.items()
        ]
        if self._broken:
            entries.append(IndexEntry(models.BROKEN, "1", "UNAVAILABLE", "no backend 'no_such_backend'"))
        return entries

    async def repository_index(self) -> list[IndexEntry]:
        return self.index()

    async def statistics(self, versions) -> bytes:
        return pb.ModelStatisticsResponse(model_stats=[each.statistics() for each in versions]).SerializeToString()

    async def load(self, name: str, config: str = "", files=None, *, allowed=None) -> None:
        raise Unavailable(NO_CONTROL)

    async def unload(self, name: str, *, dependents: bool = False, allowed=None) -> None:
        raise Unavailable(NO_CONTROL)

    def stream_ended(self, number: int) -> None:
        """No model here has sequences."""

    def submit(
        self,
        message: bytes,
        deliver,
        *,
        timeout_ns: int = -1,
        stream: bool = False,
        stream_number: int = 0,
        caller: int = 0,
        user: int = -1,
        identity: int = 0,
        client: int = 0,
        trace: object = None,
        peer: str = "",
        forwarded: bytes = b"",
    ) -> Ticket:
        ticket = Ticket(self, deliver)
        request = pb.ModelInferRequest()
        delay = 0.0
        status, details = Status.OK, ""
        try:
            _parse(request, message + forwarded)
            loaded = self.model(request.model_name, request.model_version)
            response = _run(loaded, request)
            loaded.executed(_rows(loaded.spec, request))
            delay = int(loaded.spec.parameters.get("delay_us", 0)) / 1e6
        except ServerError as error:
            status, details, response = error.status, str(error), None
        ticket.at(delay, status, details, _wrapped(request.id, details, response) if stream else _encoded(response))
        if timeout_ns >= 0:
            late = "Deadline Exceeded"
            wrapped = _wrapped(request.id, late, None) if stream else None
            ticket.at(timeout_ns / 1e9, Status.DEADLINE_EXCEEDED, late, wrapped)
        return ticket

    def control_handler(self, health) -> grpc.GenericRpcHandler:
        """A service by which tests steer the engine: JSON in, JSON out."""

        async def set_ready(request, context):
            self.set_ready(**json.loads(request))
            return b"{}"

        async def live_requests(request, context):
            return json.dumps(self.live_requests).encode()

        async def drain(request, context):
            health.drain()
            return b"{}"

        handlers = {"SetReady": set_ready, "LiveRequests": live_requests, "Drain": drain}
        return grpc.method_handlers_generic_handler(
            CONTROL, {name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in handlers.items()}
        )


def _version_number(text: str) -> int:
    if not text:
        return -1
    try:
        number = int(text)
    except ValueError:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), version should be an "
            "integral value > 0"
        ) from None
    if number < 0:
        raise InvalidArgument(f"invalid model version specified '{text}'")
    return number


def _parse(request, message):
    try:
        request.ParseFromString(message)
    except DecodeError:
        request.Clear()
        raise Internal(f"{len(message)} bytes are not a valid inference.ModelInferRequest message") from None


def _encoded(response):
    return None if response is None else response.SerializeToString()


def _wrapped(request_id, details, response):
    wrapped = pb.ModelStreamInferResponse(error_message=details)
    if response is None:
        wrapped.infer_response.id = request_id
    else:
        wrapped.infer_response.CopyFrom(response)
        wrapped.infer_response.parameters["triton_final_response"].bool_param = True
    return wrapped.SerializeToString()


def _config(spec: ModelSpec) -> config_pb.ModelConfig:
    config = config_pb.ModelConfig(name=spec.name, backend=spec.backend, max_batch_size=spec.max_batch_size)
    for tensors, field in ((spec.inputs, config.input), (spec.outputs, config.output)):
        for tensor in tensors:
            datatype = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
            field.add(name=tensor.name, data_type=f"TYPE_{datatype}", dims=tensor.dims)
    config.version_policy.latest.num_versions = 1
    config.instance_group.add(name=spec.instances[0].name, count=1, kind="KIND_CPU")
    if spec.batching is not None:
        config.dynamic_batching.SetInParent()
    for key, value in spec.parameters.items():
        config.parameters[key].string_value = value
    return config


# ---- one request ----


def _refusal(request, text):
    return InvalidArgument(f"[request id: {request.id or '<id_unknown>'}] {text}")


def _run(loaded: Loaded, request) -> pb.ModelInferResponse:
    spec = loaded.spec
    _check_parameters(request)
    data = _inputs(spec, request)
    response = pb.ModelInferResponse(model_name=spec.name, model_version=str(loaded.version), id=request.id)
    for source, output, classes in _outputs(spec, request, data):
        shape, raw = data[source.name]
        datatype = output.datatype
        if classes:
            datatype = "BYTES"
            shape, raw = _classified(spec, output, shape, raw, classes)
        response.outputs.add(name=output.name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(raw)
    return response


def _check_parameters(request):
    for key, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key.startswith("triton_") and key not in _PARAMETERS:
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified, "
                f"got '{key}'"
            )
        kinds, expected = _PARAMETERS.get(key, (_FREE, "int64_param, bool_param, or string_param"))
        if kind not in kinds or (key == "priority" and value.int64_param < 0):
            raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}")


def _inputs(spec, request):
    if len(request.raw_input_contents) > len(request.inputs):
        raise _refusal(
            request,
            f"unexpected number of raw_input_contents for model '{spec.name}', expected {len(request.inputs)}, "
            f"one for each input, got {len(request.raw_input_contents)}",
        )
    known = {tensor.name: tensor for tensor in spec.inputs}
    data = {}
    rows = None
    for position, tensor in enumerate(request.inputs):
        if tensor.name not in known:
            raise InvalidArgument(f"unexpected inference input '{tensor.name}' for model '{spec.name}'")
        if tensor.name in data:
            raise _refusal(request, f"input '{tensor.name}' already exists in request")
        _check_tensor_parameters(tensor)
        raw = _data(spec, known[tensor.name], request, position)
        rows = _check_input(spec, known[tensor.name], request, tensor, raw, rows)
        data[tensor.name] = (tuple(tensor.shape), raw)
    _check_count(spec, request, data)
    return data


def _check_tensor_parameters(tensor):
    for key in tensor.parameters:
        if key.startswith("shared_memory_"):
            raise Unimplemented(f"Client shared memory is disabled: tensor '{tensor.name}' has parameter '{key}'")


def _data(spec, known, request, position):
    tensor = request.inputs[position]
    given = [field.name for field, _ in tensor.contents.ListFields()]
    if request.raw_input_contents:
        if given:
            raise InvalidArgument(
                f"contents field must not be specified when using raw_input_contents for '{tensor.name}' for model "
                f"'{spec.name}'"
            )
        if position < len(request.raw_input_contents):
            return request.raw_input_contents[position]
    elif tensor.HasField("contents"):
        return _typed(spec, known, tensor, given)
    raise InvalidArgument(f"unable to find data for input tensor '{tensor.name}' for model '{spec.name}' in request.")


def _typed(spec, known, tensor, given):
    field = _CONTENTS.get(known.datatype)
    if set(given) - {field}:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{spec.name}', expected "
            f"{field or 'raw_input_contents, the only form for its datatype'}"
        )
    values = getattr(tensor.contents, field) if field else ()
    if known.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    size = np.dtype(_FIXED[known.datatype]).itemsize
    if known.datatype.startswith(("INT", "UINT")):
        return b"".join((value % 2**64).to_bytes(8, "little")[:size] for value in values)
    return np.array(values, _FIXED[known.datatype]).tobytes()


def _check_input(spec, known, request, tensor, raw, rows):
    where = f"'{tensor.name}' for model '{spec.name}'"
    if tensor.datatype != known.datatype:
        raise _refusal(
            request,
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{spec.name}' expects "
            f"'{known.datatype}'",
        )
    for axis, size in enumerate(tensor.shape):
        if size < 0:
            raise _refusal(
                request,
                f"All input dimensions should be specified for input {where}, got {size} in dimension {axis}",
            )
    elements = math.prod(tensor.shape)
    if elements >= 2**63:
        raise _refusal(request, f"the shape of input {where} has too many elements")
    if spec.max_batch_size:
        rows = _check_rows(spec, request, tensor, rows)
    _check_shape(spec, known, request, tensor)
    if known.datatype == "BYTES":
        _check_strings(spec, request, tensor, raw, elements)
    elif len(raw) != elements * np.dtype(_FIXED[known.datatype]).itemsize:
        expected = elements * np.dtype(_FIXED[known.datatype]).itemsize
        raise _refusal(request, f"input byte size mismatch for input {where}. Expected {expected}, got {len(raw)}")
    return rows


def _check_rows(spec, request, tensor, rows):
    if not tensor.shape:
        raise _refusal(
            request, f"input '{tensor.name}' has no shape but model requires batch dimension for '{spec.name}'"
        )
    got = tensor.shape[0]
    if got > spec.max_batch_size:
        raise _refusal(
            request, f"inference request batch-size must be <= {spec.max_batch_size} for '{spec.name}', got {got}"
        )
    if got == 0:
        raise _refusal(request, f"inference request batch-size must be >= 1 for '{spec.name}', got 0")
    if rows is not None and rows != got:
        raise _refusal(
            request,
            f"input '{tensor.name}' batch size does not match other inputs for '{spec.name}', expected {rows}, "
            f"got {got}",
        )
    return got


def _check_shape(spec, known, request, tensor):
    expected = (-1, *known.dims) if spec.max_batch_size else known.dims
    fits = len(expected) == len(tensor.shape) and all(
        want in (-1, got) for want, got in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        note = " NOTE: max_batch_size is not zero, so the shape starts with the batch dimension."
        raise _refusal(
            request,
            f"unexpected shape for input '{tensor.name}' for model '{spec.name}'. Expected {_shape(expected)}, got "
            f"{_shape(tensor.shape)}.{note if spec.max_batch_size else ''}",
        )


def _shape(dims):
    return f"[{','.join(map(str, dims))}]"


def _check_strings(spec, request, tensor, raw, elements):
    where = f"for inference input '{tensor.name}' for model '{spec.name}'"
    found = at = 0
    while at < len(raw):
        left = len(raw) - at
        if found == elements:
            raise _refusal(request, f"unexpected number of string elements {found + 1} {where}, expecting {elements}")
        if left < 4:
            raise _refusal(
                request,
                f"incomplete string length indicator {where}, expecting 4 bytes but only {left} bytes available",
            )
        (size,) = struct.unpack_from("<I", raw, at)
        if size > left - 4:
            raise _refusal(
                request,
                f"incomplete string data {where}, expecting string of length {size} but only {left - 4} bytes "
                "available",
            )
        at += 4 + size
        found += 1
    if found != elements:
        raise _refusal(request, f"expected {elements} string elements {where}, got {found}")


def _check_count(spec, request, data):
    required = [tensor.name for tensor in spec.inputs if not tensor.optional]
    missing = [name for name in required if name not in data]
    if not missing:
        return
    given = [tensor.name for tensor in spec.inputs if tensor.name in data]
    lists = (
        f"Got input(s) [{_names(given)}], but missing required input(s) [{_names(missing)}]. "
        "Please provide all required input(s)."
    )
    if len(required) == len(spec.inputs):
        expected = f"expected {len(spec.inputs)} inputs"
    else:
        expected = f"expected number of inputs between {len(required)} and {len(spec.inputs)}"
    raise _refusal(request, f"{expected} but got {len(given)} inputs for model '{spec.name}'. {lists}")


def _names(names):
    return ",".join(f"'{name}'" for name in names)


def _outputs(spec, request, data):
    """(input it comes from, output, classes or 0) for each output of the response."""
    sources = {output.name: (source, output) for source, output in zip(spec.inputs, spec.outputs, strict=True)}
    if not request.outputs:
        return [(source, output, 0) for source, output in sources.values() if source.name in data]
    chosen = {}
    for output in request.outputs:
        if output.name not in sources:
            raise InvalidArgument(f"unexpected inference output '{output.name}' for model '{spec.name}'")
        if output.name in chosen:
            raise _refusal(request, f"output '{output.name}' already exists in request")
        _check_tensor_parameters(output)
        chosen[output.name] = (*sources[output.name], _classes(output))
    return list(chosen.values())


def _classes(output):
    if "classification" not in output.parameters:
        return 0
    parameter = output.parameters["classification"]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
    if parameter.int64_param <= 0:
        raise InvalidArgument(
            f"invalid value for 'classification' parameter, expected value >= 1, got {parameter.int64_param}"
        )
    return parameter.int64_param


def _classified(spec, output, shape, raw, classes):
    if output.datatype in ("FP16", "BF16", "BOOL", "BYTES"):
        raise InvalidArgument(f"class result not available for output due to unsupported type '{output.datatype}'")
    batches = spec.max_batch_size > 0
    rows = np.frombuffer(raw, _FIXED[output.datatype]).reshape(shape[0] if batches else 1, -1)
    count = min(classes, rows.shape[1])
    elements = []
    for row in rows:
        for index in np.argsort(-row, kind="stable")[:count]:
            label = f":{output.labels[index]}" if index < len(output.labels) else ""
            elements.append(f"{row[index]:f}:{index}{label}".encode())
    encoded = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    return ((shape[0], count) if batches else (count,)), encoded


def _rows(spec, request):
    return request.inputs[0].shape[0] if spec.max_batch_size else 1
