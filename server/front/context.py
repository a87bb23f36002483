"""The context of a call on the native front door for servicers: the interface of grpc.aio.ServicerContext."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs leave it out

from inferd._native.refusal import CARDINALITY
from inferd._native.refusal import STOPPING as STOPPING_REFUSAL
from inferd._native.transport.call import EVENT_CLOSED, EVENT_DEADLINE, STATUS_DETAILS, Call, CallOverError
from inferd.server.errors import Status
from inferd.server.front.connection_limits import ListenerPolicy
from inferd.server.front.door import STOPPING
from inferd.server.front.peer import Peer, identity_key
from inferd.server.rpc.call import PeerCredentials

Metadata = Sequence[tuple[str, str | bytes]]

UNCOUNTED = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)

_ENCODINGS = {
    grpc.Compression.NoCompression: "identity",
    grpc.Compression.Deflate: "deflate",
    grpc.Compression.Gzip: "gzip",
}

log = logging.getLogger("inferd.front")


class Aborted(grpc.aio.AbortError):
    """Ends a handler after `abort`; the status is in the context."""


class NativeContext:
    """One call, on the loop. A servicer uses it like grpc.aio's; the door uses `finish`."""

    def __init__(self, call: Call, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._call = call
        self._serialize = handler.response_serializer
        self._deserialize = handler.request_deserializer
        self._conversation = handler.request_streaming and handler.response_streaming
        self._deadline = time.monotonic() + call.timeout_ns / 1e9 if call.timeout_ns >= 0 else None
        self._wake: asyncio.Event = asyncio.Event()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._headers_sent = False
        self._compress_next = True
        self._callbacks: list[Callable[[Any], None]] = []
        self._over = False
        self._draining = False
        self._cut_short = False  # the server has ended the requests before the client did
        self.task: asyncio.Task[None] | None = None
        call.on_event = self._on_event

    # -- events --

    def _on_event(self, kind: str) -> None:
        if kind == EVENT_DEADLINE:
            with suppress(CallOverError):  # the client has left meanwhile
                self._call.expire(self._trailing)
        if kind in (EVENT_CLOSED, EVENT_DEADLINE):
            self._close()
        self._wake.set()
        if kind == EVENT_CLOSED:
            self._call.on_event = None

    def _close(self) -> None:
        if self._over:
            return
        self._over = True
        if self.task is not None and not self.task.done():
            self.task.cancel()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a done callback failed")

    async def _changed(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def drain(self) -> None:
        """The server stops: a stream ends when its received requests are answered."""
        if self._conversation:
            self._draining = True
            self._wake.set()

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """Send the final status, unless the call is over. An error without details (google.rpc.Status) gets them, and
        is counted; one with details has been counted."""
        with suppress(CallOverError):  # it is over
            if self._cut_short and code is grpc.StatusCode.OK:
                self._call.refuse(Status.UNAVAILABLE, STOPPING, STOPPING_REFUSAL, self._trailing)
            elif code in UNCOUNTED or any(key == STATUS_DETAILS for key, _ in self._trailing):
                self._call.end(code.value[0], details, self._trailing)
            else:
                self._call.refuse(code.value[0], details, metadata=self._trailing)

    # -- requests --

    async def read(self) -> Any:
        """The next request message, or grpc.aio.EOF: after the client's last one, or after the last one that a
        draining call has received."""
        while True:
            # read the state before the message: a message that comes in between is taken in the next round
            ended = self._call.half_closed
            drained = self._draining and not self._call.inflating
            message = self._call.take_message()
            if message is not None:
                return self._deserialize(message) if self._deserialize else message
            if ended:
                return EOF
            if drained:
                self._cut_short = True
                return EOF
            await self._changed()

    async def read_only(self) -> Any:
        """The one request message of a call that has one.

        Raises:
            Aborted: the client sent none, or more.
        """
        message = await self.read()
        extra = message if message is EOF else await self.read()
        if message is EOF or extra is not EOF:
            got = "none" if message is EOF else "more"
            self._call.refuse(Status.UNIMPLEMENTED, f"expected one request message, got {got}", CARDINALITY)
            raise Aborted("Locally aborted.")
        return message

    async def requests(self) -> Any:
        """The request messages, on arrival."""
        while (message := await self.read()) is not EOF:
            yield message

    def hold(self, size: int) -> None:
        """Charge the call `size` bytes more for messages that it has read or will write; less if `size` is negative."""
        if self._call.open:
            self._call.hold(size)

    def let_go(self) -> None:
        """The handler has taken what it needs of the requests: stop charging the call for their messages."""
        self._call.let_go()

    # -- responses --

    async def write(self, message: Any) -> None:
        """Send one response message; return when the client has read enough of the earlier ones.

        Raises:
            CallOverError: the call is over.
        """
        await self._send(message)
        while not self._call.writable:
            await self._changed()

    async def answer(self, message: Any) -> None:
        """Send the only response message of a call, whose status follows at once: a server that stops does not end a
        call that has its status.

        Raises:
            CallOverError: the call is over.
        """
        await self._send(message)

    async def _send(self, message: Any) -> None:
        encoded = self._serialize(message) if self._serialize else message
        await self.send_initial_metadata(())
        self._call.send_message(encoded, self._compress_next)
        self._compress_next = True

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        if initial_metadata and self._headers_sent:
            raise ValueError("the initial metadata has been sent")
        if not self._headers_sent:
            self._headers_sent = True
            self._call.send_headers(tuple(initial_metadata))

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compress responses that are large enough, if the client accepts it; before the initial metadata is sent."""
        if self._headers_sent:
            raise RuntimeError("compression must be set before the initial metadata is sent")
        if self._call.open:
            self._call.set_compression(_ENCODINGS[compression])

    def disable_next_message_compression(self) -> None:
        """Send the next response uncompressed."""
        self._compress_next = False

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        if code is grpc.StatusCode.OK:
            raise ValueError("abort needs a code other than OK")
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        raise Aborted("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    # -- the call --

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def peer(self) -> str:
        return str(self._call.connection.peer)

    @property
    def listener_policy(self) -> ListenerPolicy:
        """The rules of the listener through which the call came."""
        listener_policy: ListenerPolicy = self._call.connection.admission.listener_policy
        return listener_policy

    @property
    def peer_credentials(self) -> PeerCredentials | None:
        """The client's process, if it uses a unix socket."""
        return self._client.credentials

    @property
    def identity(self) -> int:
        """A number for the owner of the client's certificate, or for its user; 0 if unknown."""
        return self._client.identity

    @property
    def client(self) -> int:
        """A number for the client, the same on all its connections."""
        number: int = self._call.connection.admission.use.number
        return number

    @property
    def connection(self) -> int:
        """The number of the client's connection; no other connection has it."""
        return self._client.number

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called when the client's connection has ended."""
        self._client.departed.append(callback)

    def peer_identities(self) -> Sequence[bytes] | None:
        key = self.peer_identity_key()
        return None if key is None else self._client.auth[key]

    def peer_identity_key(self) -> str | None:
        return identity_key(self._client.auth)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self._client.auth

    @property
    def _client(self) -> Peer:
        client: Peer = self._call.connection.client
        return client

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def cancelled(self) -> bool:
        return self._call.closed_by not in (None, 0)

    def done(self) -> bool:
        return self._over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)


class BlockingContext:
    """A context for a servicer method that is not a coroutine and runs on a thread."""

    def __init__(self, context: NativeContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def read(self) -> Any:
        return self._wait(self._context.read())

    def requests(self) -> Any:
        while (message := self.read()) is not EOF:
            yield message

    def write(self, message: Any) -> None:
        self._wait(self._context.write(message))

    def answer(self, message: Any) -> None:
        self._wait(self._context.answer(message))

    def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        self._wait(self._context.send_initial_metadata(initial_metadata))

    def set_compression(self, compression: grpc.Compression) -> None:
        async def on_the_loop() -> None:
            self._context.set_compression(compression)

        self._wait(on_the_loop())

    def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._wait(self._context.abort(code, details))

    def abort_with_status(self, status: grpc.Status) -> None:
        self._wait(self._context.abort_with_status(status))

    def is_active(self) -> bool:
        return not self._context.done()

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._context.finish, grpc.StatusCode.CANCELLED, "cancelled by the servicer")

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._loop.call_soon_threadsafe(self._context.add_done_callback, lambda _: callback())
        return self.is_active()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._context, name)
        if inspect.iscoroutinefunction(value):
            raise AttributeError(name)
        return value
