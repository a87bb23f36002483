"""The servicer of gRPC's interop cases, as its description asks for
(https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md); hosted on every door.

Whether a message came compressed is seen by no servicer of Python's gRPC, so the probes of the compressed cases, which
send a false promise, are left out.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

PROTO = Path(__file__).with_suffix(".proto")
SERVICE = "grpc.testing.TestService"
INITIAL, TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Messages:
    """The message classes of the .proto file as attributes."""

    def __init__(self) -> None:
        pool = descriptor_pool.DescriptorPool()
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "set"
            if protoc.main(["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={made}", PROTO.name]):
                raise RuntimeError(f"protoc refuses {PROTO}")
            for file in descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file:
                pool.Add(file)
        self._pool = pool

    def __getattr__(self, name):
        made = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"grpc.testing.{name}"))
        setattr(self, name, made)
        return made


pb = Messages()


def echoed_metadata(context):
    """(initial, trailing) metadata that the client wants back."""
    pairs = context.invocation_metadata()
    return [[pair for pair in pairs if pair[0] == key] for key in (INITIAL, TRAILING)]


async def begin(context):
    initial, trailing = echoed_metadata(context)
    if trailing:
        context.set_trailing_metadata(tuple(trailing))
    if initial:
        await context.send_initial_metadata(tuple(initial))


async def end_as_asked(request, context):
    if request.HasField("response_status"):
        await context.abort(_CODES[request.response_status.code], request.response_status.message)


def payload(size):
    return pb.Payload(body=bytes(size))


async def empty_call(request, context):
    return request


async def unary_call(request, context):
    if request.response_compressed.value:
        context.set_compression(grpc.Compression.Gzip)
    await begin(context)
    await end_as_asked(request, context)
    return pb.SimpleResponse(payload=payload(request.response_size))


async def respond(request, context):
    for parameters in request.response_parameters:
        await asyncio.sleep(parameters.interval_us / 1e6)
        yield pb.StreamingOutputCallResponse(payload=payload(parameters.size))


async def streaming_output_call(request, context):
    if any(parameters.compressed.value for parameters in request.response_parameters):
        context.set_compression(grpc.Compression.Gzip)
    async for response in respond(request, context):
        yield response


async def streaming_input_call(requests, context):
    size = 0
    async for request in requests:
        size += len(request.payload.body)
    return pb.StreamingInputCallResponse(aggregated_payload_size=size)


async def full_duplex_call(requests, context):
    await begin(context)
    async for request in requests:
        await end_as_asked(request, context)
        async for response in respond(request, context):
            yield response


def method_handlers():
    def coded(kind, behaviour, request):
        return kind(behaviour, request.FromString, lambda message: message.SerializeToString())

    return {
        "EmptyCall": coded(grpc.unary_unary_rpc_method_handler, empty_call, pb.Empty),
        "UnaryCall": coded(grpc.unary_unary_rpc_method_handler, unary_call, pb.SimpleRequest),
        "StreamingOutputCall": coded(
            grpc.unary_stream_rpc_method_handler, streaming_output_call, pb.StreamingOutputCallRequest
        ),
        "StreamingInputCall": coded(
            grpc.stream_unary_rpc_method_handler, streaming_input_call, pb.StreamingInputCallRequest
        ),
        "FullDuplexCall": coded(grpc.stream_stream_rpc_method_handler, full_duplex_call, pb.StreamingOutputCallRequest),
    }


def install(door):
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, method_handlers()),))
