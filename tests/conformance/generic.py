"""A servicer that uses everything a gRPC servicer may use, over plain bytes; hosted on every door.

Its handlers are registered twice: as `conformance.Generic` through `add_generic_rpc_handlers`, and as
`conformance.Registered` through `add_registered_method_handlers`. What a test must know of the server's side is
recorded under a key that the client sends in its metadata (`key`), and read back with the method `Events`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import defaultdict

import grpc
import grpc.aio

GENERIC = "conformance.Generic"
REGISTERED = "conformance.Registered"
SERVICES = (GENERIC, REGISTERED)

CHUNK = 64 * 1024
FLOOD = 1024

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_events: dict[str, list[str]] = defaultdict(list)


def _key(context):
    return dict(context.invocation_metadata()).get("key", "")


def _record(context, event):
    _events[_key(context)].append(event)


def _described(metadata):
    """Metadata as JSON: pairs in order, binary values in base64."""
    pairs = [[key, base64.b64encode(value).decode() if isinstance(value, bytes) else value] for key, value in metadata]
    return json.dumps(pairs).encode()


def _reply_metadata(request):
    """The metadata that a JSON request asks for: pairs, base64 for `-bin` keys."""
    pairs = json.loads(request or b"{}")
    return {
        kind: tuple((key, base64.b64decode(value) if key.endswith("-bin") else value) for key, value in asked)
        for kind, asked in pairs.items()
        if kind in ("initial", "trailing")
    }


# ---- unary ----


async def echo(request, context):
    return request


def echo_sync(request, context):
    return request


async def compressed(request, context):
    context.set_compression(grpc.Compression.Gzip)
    return request * 10_000


def compressed_sync(request, context):
    context.set_compression(grpc.Compression.Gzip)
    return request * 10_000


async def metadata(request, context):
    asked = _reply_metadata(request)
    if "initial" in asked:
        await context.send_initial_metadata(asked["initial"])
    if "trailing" in asked:
        context.set_trailing_metadata(asked["trailing"])
    return _described(context.invocation_metadata())


def metadata_sync(request, context):
    asked = _reply_metadata(request)
    if "initial" in asked:
        context.send_initial_metadata(asked["initial"])
    if "trailing" in asked:
        context.set_trailing_metadata(asked["trailing"])
    return _described(context.invocation_metadata())


async def abort(request, context):
    asked = json.loads(request)
    trailing = tuple(map(tuple, asked.get("trailing", ())))
    try:
        await context.abort(_CODES[asked["code"]], asked.get("details", ""), trailing_metadata=trailing)
    finally:
        _record(context, "unwound")


def abort_sync(request, context):
    asked = json.loads(request)
    try:
        context.abort(_CODES[asked["code"]], asked.get("details", ""))
    finally:
        _record(context, "unwound")


async def code(request, context):
    """Set a status without aborting, and answer all the same."""
    asked = json.loads(request)
    context.set_code(_CODES[asked["code"]])
    context.set_details(asked["details"])
    assert context.code() is _CODES[asked["code"]]
    assert context.details() == asked["details"]
    return b"dropped unless OK"


async def fail(request, context):
    raise ValueError("a secret of the server")


async def time_remaining(request, context):
    return json.dumps(context.time_remaining()).encode()


async def peer(request, context):
    return context.peer().encode()


async def hang(request, context):
    """Wait for ever; record how it ended."""
    context.add_done_callback(lambda ended: _record(context, "done"))
    _record(context, "started")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        _record(context, "cancelled")
        raise


async def finish(request, context):
    """Return at once; the done callback runs all the same."""
    assert not context.cancelled()
    assert not context.done()
    context.add_done_callback(lambda ended: _record(context, "done"))
    return b"finished"


async def events(request, context):
    return json.dumps(_events[request.decode()]).encode()


# ---- client streams ----


async def concat(requests, context):
    return b"".join([request async for request in requests])


def concat_sync(requests, context):
    return b"".join(requests)


async def concat_read(requests, context):
    read = []
    while (request := await context.read()) is not grpc.aio.EOF:
        read.append(request)
    return b"".join(read)


async def first(requests, context):
    """Answer after the first message, whatever else the client wants to send."""
    return await anext(requests)


# ---- server streams ----


async def count(request, context):
    for number in range(int(request)):
        yield str(number).encode()


def count_sync(request, context):
    for number in range(int(request)):
        yield str(number).encode()


async def count_write(request, context):
    for number in range(int(request)):
        await context.write(str(number).encode())


async def count_then_abort(request, context):
    for number in range(int(request)):
        yield str(number).encode()
    await context.abort(grpc.StatusCode.DATA_LOSS, "lost after the last one")


async def flood(request, context):
    """Write a lot; record every message that the transport took."""
    for _ in range(FLOOD):
        await context.write(b"x" * CHUNK)
        _record(context, "written")


async def hang_after_first(request, context):
    try:
        yield b"first"
        await asyncio.Event().wait()
    finally:
        _record(context, "closed")


# ---- both ways ----


async def chat(requests, context):
    async for request in requests:
        yield request


def chat_sync(requests, context):
    yield from requests


async def chat_read_write(requests, context):
    await context.send_initial_metadata((("chat", "begun"),))
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request)
    context.set_trailing_metadata((("chat", "over"),))


async def chat_until_stop(requests, context):
    """Answer until the message `stop`; what the client sends after it is never read."""
    async for request in requests:
        if request == b"stop":
            return
        yield request


async def chat_abort(requests, context):
    async for request in requests:
        yield request
        await context.abort(grpc.StatusCode.ABORTED, "after the first answer")


def method_handlers():
    """Method name → handler; no (de)serializers, so messages are bytes."""
    unary = grpc.unary_unary_rpc_method_handler
    client = grpc.stream_unary_rpc_method_handler
    server = grpc.unary_stream_rpc_method_handler
    both = grpc.stream_stream_rpc_method_handler
    return {
        "Echo": unary(echo),
        "EchoSync": unary(echo_sync),
        "EchoUpper": unary(echo, request_deserializer=bytes.upper, response_serializer=lambda text: text + b"!"),
        "Compressed": unary(compressed),
        "CompressedSync": unary(compressed_sync),
        "Metadata": unary(metadata),
        "MetadataSync": unary(metadata_sync),
        "Abort": unary(abort),
        "AbortSync": unary(abort_sync),
        "Code": unary(code),
        "Fail": unary(fail),
        "TimeRemaining": unary(time_remaining),
        "Peer": unary(peer),
        "Hang": unary(hang),
        "Finish": unary(finish),
        "Events": unary(events),
        "Concat": client(concat),
        "ConcatSync": client(concat_sync),
        "ConcatRead": client(concat_read),
        "First": client(first),
        "Count": server(count),
        "CountSync": server(count_sync),
        "CountWrite": server(count_write),
        "CountThenAbort": server(count_then_abort),
        "Flood": server(flood),
        "HangAfterFirst": server(hang_after_first),
        "Chat": both(chat),
        "ChatSync": both(chat_sync),
        "ChatReadWrite": both(chat_read_write),
        "ChatUntilStop": both(chat_until_stop),
        "ChatAbort": both(chat_abort),
    }


def install(door):
    """Register the servicer both ways."""
    handlers = method_handlers()
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GENERIC, handlers),))
    door.add_registered_method_handlers(REGISTERED, handlers)
