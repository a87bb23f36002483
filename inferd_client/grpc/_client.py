"""The synchronous client."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from inferd_client._calling import (
    NOT_REPEATED,
    Packing,
    Pieces,
    RetryOptions,
    end_of,
    failure,
    level_of,
    packing_of,
    plain,
)
from inferd_client._channel import Channel, Pending, channel_to
from inferd_client._native.link import Call, Link
from inferd_client._native.messages import framed, read_stream_response
from inferd_client._requests import InferInput, InferRequestedOutput, request_pieces
from inferd_client._results import InferResult, parsed, unreadable
from inferd_client._rpcs import Metadata, Rpcs, Then
from inferd_client.grpc._options import KeepAliveOptions, checked, policy_of, reached
from inferd_client.utils import InferenceServerException, raise_error

if TYPE_CHECKING:
    from inferd_client.regions import SharedArrays

SERVICE = "/inference.GRPCInferenceService/"
INFER = f"{SERVICE}ModelInfer"
STREAM = f"{SERVICE}ModelStreamInfer"

Callback = Callable[..., None]


class CallContext:
    """A running call."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def cancel(self) -> None:
        """Cancel the call: the callback gets an error with StatusCode.CANCELLED, unless a response has come."""
        self._pending.cancel()


class InferenceServerClient(Rpcs):
    """A client of one server. Any number of threads may use it; the methods about the stream are for one thread.

    Args:
        url: HOST:PORT, or unix:PATH.
        verbose: print requests and responses.
        ssl: use TLS.
        root_certificates: PEM file of trusted roots; None: the system's.
        private_key, certificate_chain: PEM files of this client's identity.
        creds: an ssl.SSLContext, instead of the four before.
        keepalive_options: see KeepAliveOptions.
        channel_args: names and values of gRPC's channel arguments. The client knows those about keepalive, lengths of
            messages, the authority, the name in the certificate, the user agent and load balancing, and
            `inferd.busy_poll_us` (how long a waiting thread polls before it sleeps); it ignores others.
        connections: how many there may be to the server, or with round_robin to each of its addresses. Each is made
            when it is needed.
        retries: see RetryOptions; None: the caller gets every failure.
        load_balancing: "round_robin": calls take the addresses of the server in turn, except those whose health service
            says that they do not serve. "pick_first": all calls go to the first address that accepts connections. None:
            as channel_args say, else "pick_first".
        compression_level: of requests with a `compression_algorithm`: "low" (the quickest), "medium" or "high".

    Raises:
        InferenceServerException: an argument is wrong. An unreachable server is reported by the first call.
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
        self._channel = channel_to(target, options, self._headers, checked(connections), retries, policy)
        self._verbose = verbose
        self._begun: Stream | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_begun"):
            self.close()

    def close(self) -> None:
        """End the stream and all connections; later calls fail."""
        self.stop_stream()
        self._channel.close()

    def _ask(self, method: str, request: Any, then: Then, headers: Metadata, timeout: float | None) -> Any:
        metadata = self._metadata(headers)
        if self._verbose:
            print(f"{method}, metadata {dict(metadata or {})}\n{request}")
        found = self._channel.unary(
            self._headers.of(SERVICE + method, metadata),
            [framed(request.SerializeToString())],
            timeout,
            method in NOT_REPEATED,
        )
        response = parsed(response_type(method), found)
        if self._verbose:
            print(response)
        return then(response)

    # ---- inference --------------------------------------------------------------------------------------------------

    def infer(
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
        """Have a model answer a request.

        Args:
            model_name, model_version: of the model; without version the server chooses.
            inputs: its inputs.
            outputs: the wanted outputs; None: all.
            request_id: the id of the request; the response has the same.
            sequence_id, sequence_start, sequence_end: the request's sequence; 0 and "": none.
            priority: a priority level of the model; 0: the model's default.
            timeout: microseconds that the request may wait in the model's queue.
            client_timeout: seconds that the response may take.
            headers: of the request.
            compression_algorithm: "gzip", "deflate" or None.
            parameters: for the model: text, bool, int or float.

        Raises:
            InferenceServerException: there is no response; the text says why.
        """
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
        said, pieces = self._said(INFER, headers, compression_algorithm, pieces)
        once = bool(sequence_id or sequence_start or sequence_end)
        result = InferResult(self._channel.unary(said, pieces, client_timeout, once))
        if self._verbose:
            print(result.get_response())
        return result

    def _said(
        self, method: str, headers: Metadata, compression_algorithm: str | None, pieces: Pieces
    ) -> tuple[list[tuple[bytes, bytes]], Pieces]:
        """The headers of a call and its message."""
        metadata = self._metadata(headers) if self._plugin is not None else headers
        if self._verbose:
            print(f"{method}, metadata {dict(metadata or {})}, {sum(map(len, pieces))} bytes")
        if compression_algorithm is None:
            return self._headers.of(method, metadata), pieces
        packing = packing_of(compression_algorithm, self._level)
        return self._headers.of(method, metadata, packing.encoding), packing.packed(pieces)

    def async_infer(
        self,
        model_name: str,
        inputs: Sequence[InferInput],
        callback: Callback,
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
    ) -> CallContext:
        """Begin a request like `infer`'s; at its end another thread calls `callback(result=..., error=...)`."""
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
        said, pieces = self._said(INFER, headers, compression_algorithm, pieces)
        once = bool(sequence_id or sequence_start or sequence_end)
        return CallContext(self._channel.start(said, pieces, client_timeout, _Response(callback), once))

    # ---- the stream -------------------------------------------------------------------------------------------------

    @property
    def _stream(self) -> Stream | None:
        """The stream, unless it is that of a parent process."""
        begun = self._begun
        return begun if begun is not None and begun.forks == self._channel.forks else None

    def start_stream(
        self,
        callback: Callback,
        stream_timeout: float | None = None,
        headers: Metadata = None,
        compression_algorithm: str | None = None,
    ) -> None:
        """Begin the stream; another thread calls `callback(result=..., error=...)` for each response and for an error.

        Args:
            stream_timeout: seconds that the stream may last.
            headers: of the stream.
            compression_algorithm: of requests: "gzip", "deflate" or None.

        Raises:
            InferenceServerException: there is a stream already, or no connection can be made.
        """
        if self._stream is not None:
            raise_error(
                "cannot start another stream with one already running. 'InferenceServerClient' supports only a single "
                "active stream at a given time."
            )
        packing = packing_of(compression_algorithm, self._level)
        said = self._headers.of(STREAM, self._metadata(headers), packing.encoding)
        self._begun = Stream(self._channel, said, stream_timeout, packing, callback)

    def stop_stream(self, cancel_requests: bool = False) -> None:
        """End the stream when all requests are answered, or at once with `cancel_requests`.

        No callback is called after this method has returned, unless a callback calls this method.
        """
        stream, self._begun = self._stream, None
        if stream is not None:
            stream.close(cancel_requests)

    def async_stream_infer(
        self,
        model_name: str,
        inputs: Sequence[InferInput],
        model_version: str = "",
        outputs: Sequence[InferRequestedOutput] | None = None,
        request_id: str = "",
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        enable_empty_final_response: bool = False,
        priority: int = 0,
        timeout: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Send a request like `infer`'s in the stream.

        Args:
            enable_empty_final_response: after the last response of a decoupled model, the server sends one without
                outputs.

        Raises:
            InferenceServerException: there is no stream, or it has ended.
        """
        stream = self._stream
        if stream is None:
            raise_error("stream not available, use start_stream() to make one available.")
        stream.send(
            request_pieces(
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
                enable_empty_final_response,
            )
        )

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def shared(self, arrays: Mapping[str, Any], name: str | None = None, device: int | None = None) -> SharedArrays:
        """Arrays in a region that the server has registered, until the `with` statement ends; see SharedArrays.

        Args:
            arrays, name: see SharedArrays.
            device: the number of the CUDA device whose memory has the region, see DeviceArrays; None: host memory.
        """
        from inferd_client.regions import DeviceArrays, SharedArrays

        return SharedArrays(self, arrays, name) if device is None else DeviceArrays(self, arrays, name, device)


def response_type(method: str) -> Any:
    """The message class of an RPC's response."""
    from inferd_client.pb import grpc_service_pb2 as pb

    return getattr(pb, f"{method}Response")


class _Response:
    """Calls back with the response to a request."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def ended(self, message: Any, error: InferenceServerException | None) -> None:
        """See EndListener."""
        self._callback(result=None if error is not None else InferResult(message), error=error)


class Stream:
    """The stream of a client: sends requests at once, and calls back with responses."""

    def __init__(
        self,
        channel: Channel,
        headers: list[tuple[bytes, bytes]],
        timeout: float | None,
        packing: Packing,
        callback: Callback,
    ) -> None:
        self._channel = channel
        self._packing = packing
        self._callback = callback
        self._over = False  # the call has ended
        self._ended = threading.Event()  # and the last callback has returned
        self._sending = threading.RLock()  # a signal handler may send, too
        self._complete = False  # no request follows
        self.forks = channel.forks
        self._call = Call(headers, [], timeout, many=True, goes_on=True, owner=self)
        self._link: Link = channel.announced(self._call, end_of(timeout))

    def send(self, pieces: Pieces) -> None:
        """Send a request.

        Raises:
            InferenceServerException: the stream has ended.
        """
        pieces = self._packing.packed(pieces)
        with self._sending:
            if self._over or self._complete:
                raise_error(
                    "The stream is no longer in valid state, the error detail is reported through provided callback. A "
                    "new stream should be started after stopping the current stream."
                )
            self._link.send(self._call, pieces)

    def close(self, cancel: bool) -> None:
        """End the stream, and wait for the end."""
        if sys.is_finalizing():
            return  # the reading thread has stopped
        if cancel:
            self._link.give_up(self._call)
        else:
            with self._sending:
                self._complete = True
                if not self._over:
                    self._link.send(self._call, [], goes_on=False)
        if self._link.owner is not threading.current_thread():
            self._ended.wait()

    def call_changed(self, call: Call, done: bool) -> None:
        """See Owner of link.pyi."""
        try:
            for message in call.messages():
                self._tell(**stream_response(message, self._channel.options.limit))
            if done:
                self._over = True
                if call.status()[0] != 0:
                    self._tell(result=None, error=failure(call))
        finally:
            if done:
                self._over = True
                self._ended.set()

    def _tell(self, **response: Any) -> None:
        """Call back; an exception of the callback is printed, and the next responses are still called back."""
        try:
            self._callback(**response)
        except BaseException:
            sys.excepthook(*sys.exc_info())


def stream_response(message: tuple[Any, str], limit: int) -> dict[str, Any]:
    """The result and the error of a message of a stream; one of them is None."""
    try:
        content = plain(message[0], message[1], limit)
        error, start, end = read_stream_response(content)
    except InferenceServerException as found:
        return {"result": None, "error": found}
    except ValueError as found:
        return {"result": None, "error": unreadable(found)}
    if error:
        return {"result": None, "error": InferenceServerException(error)}
    return {"result": InferResult(content, start, end), "error": None}
