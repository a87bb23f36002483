"""Calls of a model to other models (BLS). A thread, a coroutine or an iterator waits for the responses."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .channel import Call, Channel
from .errors import TritonError, TritonModelException
from .request import Request
from .response import InferenceResponse
from .runtime import PARENT, Runtime, current

if TYPE_CHECKING:
    import asyncio

    from .sender import InferenceResponseSender


class BlockingCall(Call):
    """A call whose thread waits for its one response."""

    __slots__ = ("_response",)

    blocking = True

    def deliver(self, response: InferenceResponse, final: bool) -> None:  # noqa: ARG002 (it is the one)
        self._response = response
        self.finish()

    def wait(self, channel: Channel) -> InferenceResponse:
        """The response, once it is there."""
        channel.wait(self)
        return self._response


class OpenCall(Call):
    """A call under way: a thread or coroutines wait for its responses one by one."""

    __slots__ = ("_arrived", "_channel", "_future", "_loop")

    def __init__(self, channel: Channel, model: str, decoupled: bool) -> None:
        super().__init__(model, decoupled)
        self._channel = channel  # the channel that sent it, also in a fork
        self._arrived: deque[InferenceResponse] = deque()
        # A coroutine waits on the future; only its loop may touch it.
        self._future: asyncio.Future[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def deliver(self, response: InferenceResponse, final: bool) -> None:
        self._arrived.append(response)
        if final:
            self.final = True
        self.finish()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
                self._loop.call_soon_threadsafe(self._resolve)

    # -- one response

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """A future of the response, or of the next one."""
        self._channel.expect()
        self._loop = loop
        self._future = loop.create_future()
        self._future.add_done_callback(self._given_up)
        return self._future

    def _resolve(self) -> None:
        future = self._future
        if future is not None and not future.done() and self._arrived:
            future.set_result(self._arrived.popleft())

    def _given_up(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and not self.decoupled:
            self.cancel()

    # -- several

    def next(self) -> InferenceResponse:
        """Wait for the next response. Not to be called after the final one."""
        while not self._arrived:
            self.done = False
            if not self._arrived:  # it may have come in between
                self._channel.wait(self)
        return self._take()

    def _take(self) -> InferenceResponse:
        response = self._arrived.popleft()
        if not self.final:
            self._channel.consumed(self)
        return response

    async def next_async(self) -> InferenceResponse:
        """Wait for the next response, and let other coroutines run meanwhile."""
        import asyncio

        if self._arrived:
            return self._take()
        future = self.future(asyncio.get_running_loop())
        self._resolve()  # it may have come in between
        try:
            response: InferenceResponse = await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the response had come: it is for the next caller
                self._arrived.appendleft(future.result())
            raise
        if not self.final:
            self._channel.consumed(self)
        return response

    async def begun(self) -> ResponseIterator:
        """Wait for the first response; an iterator over all of them."""
        import asyncio

        iterator = ResponseIterator(self)  # made first: when it is dropped, it ends the call
        if not self._arrived:
            future = self.future(asyncio.get_running_loop())
            self._resolve()  # it may have come in between
            self._arrived.appendleft(await future)
        return iterator

    def is_over(self) -> bool:
        """Whether every response has been taken."""
        return self.final and not self._arrived

    def cancel(self) -> None:
        """Tell the server that no caller waits for the call any more."""
        if not self.final:
            self._channel.cancel(self)


class ResponseIterator:
    """The responses to a request, as they come; after the last one, it can be iterated again.

    The last response may be empty: a decoupled model may end with a flag alone.
    """

    __slots__ = ("_call", "_index", "_seen")

    def __init__(self, call: OpenCall) -> None:
        self._call = call
        self._seen: list[InferenceResponse] = []
        self._index = 0  # of the next response, in a further iteration

    def __iter__(self) -> ResponseIterator:
        if self._call.is_over() and self._index >= len(self._seen):
            self._index = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._call.is_over():
            return self._again()
        response = self._call.next()
        self._keep(response)
        return response

    def _again(self) -> InferenceResponse:
        if self._index >= len(self._seen):
            raise StopIteration("Iteration is done for the responses.")
        self._index += 1
        return self._seen[self._index - 1]

    def _keep(self, response: InferenceResponse) -> None:
        self._seen.append(response)
        if self._call.is_over():
            self._index = len(self._seen)

    def __aiter__(self) -> ResponseIterator:
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        if self._call.is_over():
            try:
                return self._again()
            except StopIteration:
                raise StopAsyncIteration from None
        response = await self._call.next_async()
        self._keep(response)
        return response

    def cancel(self) -> None:
        """Request cancellation. The iteration still ends with the model's last response."""
        self._call.cancel()

    def __del__(self) -> None:
        self._call.cancel()


def infer(request: Request) -> InferenceResponse:
    """Send a request to another model and wait for its response.

    Raises:
        TritonModelException: called while the model is initialized or finalized.
    """
    channel = _runtime().channel
    call = BlockingCall(request.model_name(), False)
    _send(channel, request, call)
    return call.wait(channel)


def start(request: Request, decoupled: bool) -> OpenCall:
    """Send a request to another model.

    Raises:
        TritonModelException: called while the model is initialized or finalized.
    """
    call = _new_call(request, decoupled)
    _send(call._channel, request, call)
    return call


def start_async(request: Request, decoupled: bool) -> asyncio.Future[Any]:
    """Send a request; return the future of its response, or, once one is there, of an iterator over all."""
    import asyncio

    loop = asyncio.get_running_loop()
    call = _new_call(request, decoupled)
    if not decoupled:
        future = call.future(loop)  # before the response can come
        _send(call._channel, request, call)
        return future
    _send(call._channel, request, call)
    return loop.create_task(call.begun())


def _send(channel: Channel, request: Request, call: Call) -> None:
    """Send a request; an error of sending becomes its response."""
    try:
        channel.call(request, call, PARENT.get())
    except TritonModelException as error:
        call.deliver(InferenceResponse(error=TritonError(str(error))), True)


def _new_call(request: Request, decoupled: bool) -> OpenCall:
    return OpenCall(_runtime().channel, request.model_name(), decoupled)


def _runtime() -> Runtime:
    runtime = current()
    if not runtime.initialized or runtime.finalizing:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return runtime


class InferenceRequest(Request):
    __doc__ = Request.__doc__

    __slots__ = ()

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send it and wait.

        Returns:
            The response, which may be an error; with `decoupled` an iterator over the responses as they come.

        Raises:
            TritonModelException: called while the model is initialized or finalized.
        """
        return ResponseIterator(start(self, True)) if decoupled else infer(self)

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:
        """Send it; await the response, or with `decoupled` an iterator over the responses, `for` or `async for`.

        The iterator comes with the first response, so a plain `for` blocks the loop only for later responses.

        Raises:
            TritonModelException: called while the model is initialized or finalized.
            RuntimeError: no event loop is running.
        """
        return start_async(self, decoupled)

    # -----------------------------------------------------------------------------------------------------------------
    # Answering, only for requests that a model receives

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of responses to this request, the same one each time.

        Raises:
            TritonModelException: the model made the request itself.
        """
        raise TritonModelException(
            "Unable to send response. Response sender has no reference to the decoupled state of the model."
        )

    def is_cancelled(self) -> bool:
        """Whether the response is no longer wanted: the client cancelled, its deadline passed or it disconnected."""
        return False

    def set_release_flags(self, flags: int) -> None:  # noqa: ARG002 (for those that the server gives)
        """Set the fate of the request after `execute` returns.

        Args:
            flags: TRITONSERVER_REQUEST_RELEASE_ALL, the default, or
                TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: the server gives the request to the model again, which needs
                    `iterative_sequence` in the configuration.
        """
        raise TritonModelException("a request made by the model has no release flags")
