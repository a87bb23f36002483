"""A raw client of the inference service: every RPC by name, with the messages of `inferd_client.pb`."""

from __future__ import annotations

import json

import grpc
import numpy as np

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import fake_engine

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class Stub:
    """The methods of the service as attributes: `stub.ModelInfer(request)`; `stub.raw("ModelInfer")` takes bytes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name):
        if name not in SERVICE.methods_by_name:
            raise AttributeError(name)
        response = getattr(pb, SERVICE.methods_by_name[name].output_type.name)
        return self._callable(name, lambda message: message.SerializeToString(), response.FromString)

    def raw(self, name):
        return self._callable(name, None, None)

    def _callable(self, name, serialize, deserialize):
        streaming = SERVICE.methods_by_name[name].server_streaming
        make = self._channel.stream_stream if streaming else self._channel.unary_unary
        return make(f"/{SERVICE.full_name}/{name}", request_serializer=serialize, response_deserializer=deserialize)


class Control:
    """Steers the fake engine behind the server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def _call(self, name, /, **arguments):
        return json.loads(self._channel.unary_unary(f"/{fake_engine.CONTROL}/{name}")(json.dumps(arguments).encode()))

    def set_ready(self, name, version, ready):
        self._call("SetReady", name=name, version=version, ready=ready)

    def live_requests(self):
        return self._call("LiveRequests")

    def drain(self):
        self._call("Drain")


def request(model, *arrays, id="", version="", outputs=(), parameters=(), datatypes=()):  # noqa: A002 - the field's name
    """A ModelInferRequest with the n-th array as the raw contents of INPUTn; numeric arrays only."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for position, array in enumerate(arrays):
        datatype = datatypes[position] if datatypes else DATATYPES[array.dtype]
        message.inputs.add(name=f"INPUT{position}", datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    for name in outputs:
        message.outputs.add(name=name)
    for key, value in dict(parameters).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[key], kind, value)
    return message


DATATYPES = {
    np.dtype(kind): name
    for name, kind in {
        "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1", "INT16": "i2",
        "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
    }.items()
}  # fmt: skip
"""numpy dtype → datatype of the protocol."""


def floats(*values):
    """A batch of one row of FP32."""
    return np.array([values], np.float32)


def output(response, position=0):
    """The n-th output of a response as an array; numeric datatypes only."""
    tensor = response.outputs[position]
    dtype = next(dtype for dtype, name in DATATYPES.items() if name == tensor.datatype)
    return np.frombuffer(response.raw_output_contents[position], dtype).reshape(tensor.shape)
