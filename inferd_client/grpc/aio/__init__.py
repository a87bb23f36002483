"""The asynchronous client, with the names of `tritonclient.grpc.aio`. It makes no threads."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from inferd_client._calling import NOT_REPEATED, Packing, RetryOptions, end_of, failure, left_of, level_of, packing_of
from inferd_client._loops import LoopChannel, Polled, give_up, loop_channel_to
from inferd_client._native.link import Call
from inferd_client._native.messages import framed
from inferd_client._requests import InferInput, InferRequestedOutput, request_pieces
from inferd_client._results import InferResult, parsed
from inferd_client._rpcs import Metadata, Rpcs, Then
from inferd_client.grpc import CallContext, InferenceServerClientPlugin, Request
from inferd_client.grpc._client import INFER, SERVICE, STREAM, response_type, stream_response
from inferd_client.grpc._options import MAX_GRPC_MESSAGE_SIZE, KeepAliveOptions, checked, policy_of, reached
from inferd_client.utils import (
    InferenceServerException,
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    raise_error,
    serialize_byte_tensor,
    serialized_byte_size,
    triton_to_np_dtype,
)

__all__ = [
    "InferenceServerClient",
    "InferInput",
    "InferRequestedOutput",
    "InferResult",
    "InferenceServerException",
    "KeepAliveOptions",
    "RetryOptions",
    "CallContext",
    "InferenceServerClientPlugin",
    "Request",
    "MAX_GRPC_MESSAGE_SIZE",
    "deserialize_bytes_tensor",
    "np_to_triton_dtype",
    "raise_error",
    "serialize_byte_tensor",
    "serialized_byte_size",
    "triton_to_np_dtype",
]

DEFAULTS: dict[str, Any] = {
    "model_version": "",
    "outputs": None,
    "request_id": "",
    "sequence_id": 0,
    "sequence_start": False,
    "sequence_end": False,
    "priority": 0,
    "timeout": None,
    "parameters": None,
}
"""The keys that `stream_infer` knows in the dict of each request."""


class InferenceServerClient(Rpcs):
    """A client of one server, for coroutines of one event loop at a time.

    Arguments and methods are those of `inferd_client.grpc.InferenceServerClient`; the methods are awaited.
    """

    def __init__(
        self,
        url: str,
        verbose: bool = False,
        ssl: bool = False,
        root_certificates: str | None = None,
        private_key: str | None = None,
        certificate_chain: str | None = None,
        creds: Any = None,
        keepalive_options: KeepAliveOptions | None = None,
        channel_args: Iterable[tuple[str, Any]] | None = None,
        *,
        connections: int = 1,
        retries: RetryOptions | None = None,
        compression_level: str = "low",
        load_balancing: str | None = None,
    ) -> None:
        self._level = level_of(compression_level)
        target, options, self._headers = reached(
            url, ssl, root_certificates, private_key, certificate_chain, creds, keepalive_options, channel_args
        )
        policy = policy_of(load_balancing, channel_args)
        self._channel = loop_channel_to(target, options, self._headers, checked(connections), retries, policy)
        self._verbose = verbose

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls and connections; later calls fail."""
        self._channel.close()

    async def _ask(self, method: str, request: Any, then: Then, headers: Metadata, timeout: float | None) -> Any:
        metadata = self._metadata(headers)
        if self._verbose:
            print(f"{method}, metadata {dict(metadata or {})}\n{request}")
        found = await self._channel.unary(
            self._headers.of(SERVICE + method, metadata),
            [framed(request.SerializeToString())],
            timeout,
            method in NOT_REPEATED,
        )
        response = parsed(response_type(method), found)
        if self._verbose:
            print(response)
        return then(response)

    async def infer(
        self,
        model_name: str,
        inputs: Sequence[InferInput],
        model_version: str = "",
        outputs: Sequence[InferRequestedOutput] | None = None,
        request_id: str = "",
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        priority: int = 0,
        timeout: int | None = None,
        client_timeout: float | None = None,
        headers: Metadata = None,
        compression_algorithm: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> InferResult:
        """Have a model answer a request; see the synchronous client."""
        pieces = request_pieces(
            model_name,
            inputs,
            model_version,
            outputs,
            request_id,
            sequence_id,
            sequence_start,
            sequence_end,
            priority,
            timeout,
            parameters,
        )
        metadata = self._metadata(headers) if self._plugin is not None else headers
        packing = packing_of(compression_algorithm, self._level)
        result = InferResult(
            await self._channel.unary(
                self._headers.of(INFER, metadata, packing.encoding),
                packing.packed(pieces),
                client_timeout,
                bool(sequence_id or sequence_start or sequence_end),
            )
        )
        if self._verbose:
            print(result.get_response())
        return result

    def stream_infer(
        self,
        inputs_iterator: AsyncIterator[dict[str, Any]],
        stream_timeout: float | None = None,
        headers: Metadata = None,
        compression_algorithm: str | None = None,
    ) -> ResponseIterator:
        """Send requests in a stream.

        Args:
            inputs_iterator: yields one dict for each request: the arguments of `infer` that describe the request, by
                name, and `enable_empty_final_response`.
            stream_timeout: seconds that the stream may last.
            headers: of the stream.
            compression_algorithm: of requests: "gzip", "deflate" or None.

        Returns:
            An iterator of pairs (result, error), one of them None. Its method `cancel` ends the stream, and so does
            dropping the iterator.
        """
        packing = packing_of(compression_algorithm, self._level)
        said = self._headers.of(STREAM, self._metadata(headers), packing.encoding)
        return ResponseIterator(Stream(self._channel, said, stream_timeout, packing, inputs_iterator))


def _pieces(inputs: Any) -> Any:
    """A request of the stream."""
    if type(inputs) is not dict:
        raise_error("inputs_iterator is not yielding a dict")
    if "model_name" not in inputs or "inputs" not in inputs:
        raise_error("model_name and/or inputs is missing from inputs_iterator's yielded dict")
    said = {**DEFAULTS, **inputs}
    if type(said["model_version"]) is not str:
        raise_error("model_version must be a string")
    known = {name: said[name] for name in DEFAULTS}
    wants_final = bool(said.get("enable_empty_final_response", False))
    return request_pieces(said["model_name"], said["inputs"], **known, final_response=wants_final)


class ResponseIterator:
    """The responses of a stream: pairs (result, error), one of them None.

    The stream is cancelled when the iterator is dropped, such as after a `break`.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._stream.abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[InferResult | None, InferenceServerException | None]:
        return await self._stream.following()

    def cancel(self) -> bool:
        """Cancel the stream. Returns whether it was still running."""
        return self._stream.cancel()


class Stream:
    """A stream of requests from an iterator, and its untaken responses."""

    def __init__(
        self,
        channel: LoopChannel,
        headers: list[tuple[bytes, bytes]],
        timeout: float | None,
        packing: Packing,
        inputs: AsyncIterator[dict[str, Any]],
    ) -> None:
        self._channel = channel
        self._packing = packing
        self._inputs = inputs
        self._found: deque[Any] = deque()
        self._news: asyncio.Future[None] | None = None
        self._forks = channel.forks
        self._ended = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._polled: Polled | None = None
        self._call = Call(headers, [], timeout, many=True, goes_on=True, owner=self)
        self._ends = end_of(timeout)
        self._alarm: asyncio.TimerHandle | None = None
        self._feeder = asyncio.ensure_future(self._feed())

    async def _feed(self) -> None:
        """Send the requests."""
        try:
            loop = asyncio.get_running_loop()
            while self._polled is None:
                polled = self._channel.usable(loop) or await self._channel.link(self._ends)
                if polled.link.start(self._call):
                    self._polled = polled
            if self._channel.options.keepalive is not None:
                self._polled.keep_alive()
            left = left_of(self._ends)
            if left is not None:
                self._alarm = loop.call_later(left, give_up, self._polled, self._call, True)
            async for inputs in self._inputs:
                self._polled.link.send(self._call, self._packing.packed(_pieces(inputs)))
                self._polled.flush_soon()
                await self._polled.room(self._call)
            self._polled.link.send(self._call, [], goes_on=False)
            self._polled.flush_soon()
        except Exception as error:
            self._error = error
            if self._polled is not None:
                give_up(self._polled, self._call, False)
            self._ended = True
            self._tell()

    def call_changed(self, call: Call, done: bool) -> None:
        """See Owner of link.pyi."""
        if done:
            self._found.extend(call.messages())
            self._ended = True
            if self._alarm is not None:
                self._alarm.cancel()
            if call.status()[0] != 0 and self._error is None:
                self._error = asyncio.CancelledError() if self._cancelled else failure(call)
            self._feeder.cancel()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def following(self) -> tuple[InferResult | None, InferenceServerException | None]:
        """The next response.

        Raises:
            StopAsyncIteration: there is no further response.
            InferenceServerException: the stream has failed.
            asyncio.CancelledError: the stream was cancelled.
            Exception: the iterator of requests has raised it.
        """
        while not self._found:
            if self._take():
                break
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        response = stream_response(self._found.popleft(), self._channel.options.limit)
        return response["result"], response["error"]

    def _take(self) -> bool:
        """Take the arrived responses, so that the server may send more. Returns whether there was one."""
        if self._polled is None:
            return False
        self._found.extend(self._call.messages())
        if self._found:
            self._polled.flush_soon()
        return bool(self._found)

    def _goes_on(self) -> bool:
        """Whether the stream has not ended, and belongs to this process, not to its parent."""
        return not self._ended and self._forks == self._channel.forks

    def abandon(self) -> None:
        """The responses are no longer wanted; any thread may call this."""
        if self._goes_on():
            with suppress(RuntimeError):  # the loop is closed
                self._feeder.get_loop().call_soon_threadsafe(self.cancel)

    def cancel(self) -> bool:
        """See ResponseIterator."""
        if not self._goes_on():
            return False
        self._cancelled = True
        if self._polled is not None:
            give_up(self._polled, self._call, False)
        else:
            self._ended = True
            self._error = asyncio.CancelledError()
        self._feeder.cancel()
        self._tell()
        return True
