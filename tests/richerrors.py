"""google.rpc.Status and what is in it, declared here by the published field numbers and read by official protobuf."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message_factory

from tests.framing import Answer

KEY = "grpc-status-details-bin"

_FIELDS = {
    "Status": (("code", 1, "int32"), ("message", 2, "string"), ("details", 3, "*google.protobuf.Any")),
    "ErrorInfo": (("reason", 1, "string"), ("domain", 2, "string")),
    "RetryInfo": (("retry_delay", 1, "google.protobuf.Duration"),),
}


def _messages():
    file = descriptor_pb2.FileDescriptorProto(name="rich.proto", package="google.rpc", syntax="proto3")
    file.dependency.extend(("google/protobuf/any.proto", "google/protobuf/duration.proto"))
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            added = message.field.add(name=field, number=number, label=3 if kind.startswith("*") else 1)
            if "." in kind:
                added.type, added.type_name = kinds.TYPE_MESSAGE, "." + kind.lstrip("*")
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    for known in (any_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"google.rpc.{name}")) for name in _FIELDS}


_CLASSES = _messages()


@dataclass(frozen=True)
class Rich:
    """The details of an error beside its status and text."""

    code: int
    message: str
    reason: str
    domain: str
    retry_seconds: float | None = None


def read(encoded: bytes) -> Rich:
    """The parts of an encoded google.rpc.Status."""
    status = _CLASSES["Status"].FromString(encoded)
    parts = {}
    for detail in status.details:
        assert detail.type_url.startswith("type.googleapis.com/google.rpc.")
        name = detail.type_url.rpartition(".")[2]
        parts[name] = _CLASSES[name].FromString(detail.value)
    delay = parts["RetryInfo"].retry_delay if "RetryInfo" in parts else None
    seconds = None if delay is None else delay.seconds + delay.nanos / 1e9
    return Rich(status.code, status.message, parts["ErrorInfo"].reason, parts["ErrorInfo"].domain, seconds)


def of(error: grpc.RpcError) -> Rich:
    """The details of a failed call, which must agree with its status and text."""
    (encoded,) = (value for key, value in error.trailing_metadata() if key == KEY)
    return _agreeing(read(encoded), error.code().value[0], error.details())


def of_answer(answer: Answer) -> Rich:
    """The same of an answer in HTTP/2 frames."""
    told = answer.headers[KEY]
    return _agreeing(read(base64.b64decode(told + "=" * (-len(told) % 4))), answer.status, answer.details)


def _agreeing(rich: Rich, status: int, text: str) -> Rich:
    assert (rich.code, rich.message, rich.domain) == (status, text, "inferd")
    return rich
