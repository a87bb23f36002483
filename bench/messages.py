"""Requests of the benchmark table and the answers an identity model gives to them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from inferd_client.pb import grpc_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Exchange:
    """A serialized ModelInferRequest; `response` is the answer of peers that cannot infer."""

    request: bytes
    response: bytes


def floats(count: int) -> bytes:
    """`count` FP32 elements that compress badly and differ from each other."""
    return struct.pack(f"<{count}f", *(i * 0.5 + 1.0 for i in range(count)))


def request(model: str, inputs: dict[str, tuple[str, list[int], bytes]], outputs: list[str] | None = None) -> bytes:
    """A request with raw contents: name -> (datatype, shape, bytes)."""
    message = pb.ModelInferRequest(model_name=model)
    for name, (datatype, shape, raw) in inputs.items():
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    for name in outputs or ():
        message.outputs.add(name=name)
    return message.SerializeToString()


def response(model: str, outputs: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A response with raw contents: name -> (datatype, shape, bytes)."""
    message = pb.ModelInferResponse(model_name=model, model_version="1")
    for name, (datatype, shape, raw) in outputs.items():
        message.outputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_output_contents.append(raw)
    return message.SerializeToString()


def identity(payload_bytes: int, model: str = "identity") -> Exchange:
    """One FP32 tensor of one row, in and out."""
    count = payload_bytes // 4
    tensor = ("FP32", [1, count], floats(count))
    return Exchange(request(model, {"INPUT0": tensor}), response(model, {"OUTPUT0": tensor}))


def large_in(payload_bytes: int, model: str = "large_in") -> Exchange:
    """A large and a 64-byte tensor in, the small one out."""
    large = ("FP32", [1, payload_bytes // 4], floats(payload_bytes // 4))
    small = ("FP32", [1, 16], floats(16))
    return Exchange(
        request(model, {"INPUT0": large, "INPUT1": small}, ["OUTPUT1"]), response(model, {"OUTPUT1": small})
    )


def check_response(answer: bytes, expected: bytes) -> None:
    """Compare the outputs and their bytes of two serialized responses.

    Raises:
        ValueError: they differ.
    """
    got, wanted = pb.ModelInferResponse.FromString(answer), pb.ModelInferResponse.FromString(expected)
    tensors = [(o.name, o.datatype, list(o.shape)) for o in got.outputs]
    expected_tensors = [(o.name, o.datatype, list(o.shape)) for o in wanted.outputs]
    if tensors != expected_tensors:
        raise ValueError(f"wrong answer: expected outputs {expected_tensors}, got {tensors}")
    if list(got.raw_output_contents) != list(wanted.raw_output_contents):
        raise ValueError("wrong answer: the bytes of an output differ")
