"""The host of one model instance: it imports the model's file, calls its methods and checks the results."""

from __future__ import annotations

import os
import threading
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from . import protocol, runtime
from .config import ModelConfig
from .errors import TritonError, TritonModelException, exception_text
from .loading import forget_model, import_model, model_class
from .received import ReceivedRequest
from .request import RELEASE_RESCHEDULE
from .response import InferenceResponse
from .sender import InferenceResponseSender, close, reopen, take_final

if TYPE_CHECKING:
    import asyncio

    from .channel import Channel


class ModelFailed(Exception):
    """`execute` raised, or returned a wrong result; callers get the text."""


class Host:
    """One instance of a model.

    Args:
        channel: the way to the server.
        model_file: path of the model's file.
        model_dir: the version directory.
        package: the name of the package that the file's folder becomes.
        decoupled: the model answers through senders.
    """

    def __init__(self, channel: Channel, model_file: str, model_dir: str, package: str, decoupled: bool) -> None:
        self.name = channel.name
        self.decoupled = decoupled
        self.has_is_ready = False
        self._file = model_file
        self._package = package
        self.runtime = runtime.Runtime(channel, model_dir, package)
        self._model: Any = None
        self._execute: Any = None
        self._loop: EventLoop | None = None
        self._starting = threading.Lock()
        runtime.add(self.runtime)

    # -----------------------------------------------------------------------------------------------------------------
    # Life

    def complete(self, config: Mapping[str, Any], args: dict[str, str]) -> dict[str, Any]:
        """Have the model complete its configuration; the server's own programs also get the arguments of `load`.

        Raises:
            TritonModelException: the model does not return a ModelConfig.
            Exception: whatever the model raises.
        """
        found: Any = ModelConfig(config)
        model = model_class(import_model(self._file, self._package))
        if hasattr(model, "complete_with_arguments"):
            found = model.complete_with_arguments(found, args)
        elif hasattr(model, "auto_complete_config"):
            found = model.auto_complete_config(found)
        if not isinstance(found, ModelConfig):
            raise TritonModelException(
                f"auto_complete_config function in model '{self.name}' must return a valid pb.ModelConfig object."
            )
        return found.as_dict()

    def load(self, args: dict[str, str]) -> None:
        """Make the model and initialize it.

        Raises:
            Exception: whatever the model raises.
        """
        self._model = model_class(import_model(self._file, self._package))()
        if hasattr(self._model, "initialize"):
            self._model.initialize(args)
        self._execute = getattr(self._model, "execute", None)
        self.has_is_ready = hasattr(self._model, "is_ready")
        self.runtime.initialized = True

    def finalize(self) -> None:
        """Have the model clean up, and log what it raises."""
        self.runtime.finalizing = True
        if self._loop is not None:
            self._loop.stop()
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except Exception as error:
                self.runtime.channel.log(protocol.LOG_INFO, exception_text(error))
        self._model = self._execute = None

    def use_on_this_thread(self) -> None:
        """Mark the thread as the model's: on it, functions of `triton_python_backend_utils` act for this model."""
        runtime.use_on_this_thread(self.runtime)

    def close(self) -> None:
        """Forget the model."""
        self._model = self._execute = None
        runtime.use_on_this_thread(None)
        runtime.remove(self.runtime)
        forget_model(self._package)

    def is_ready(self) -> bool:
        """The answer of the model's is_ready(); True if the model has none.

        Raises:
            TritonModelException: the answer is no bool.
            Exception: whatever the model raises.
        """
        if not self.has_is_ready:
            return True
        result = self._model.is_ready()
        if isinstance(result, Coroutine):
            result = self._event_loop().run(result)
        if not isinstance(result, bool):
            raise TritonModelException("is_ready() must return a boolean value")
        return result

    # -----------------------------------------------------------------------------------------------------------------
    # Execution

    def execute(self, requests: list[ReceivedRequest]) -> list[InferenceResponse | None]:
        """Have the model execute a batch.

        Returns:
            A response for each request; None for one that its sender answers, or that is to be rescheduled.

        Raises:
            ModelFailed: the model raised, or returned something wrong.
        """
        if len(requests) == 1:
            request = requests[0]
            runtime.PARENT.set((request._key, request._request_id))
        else:
            runtime.PARENT.set(runtime.NO_PARENT)
        try:
            if self._execute is None:
                raise ModelFailed(f"Python model {self._file} does not implement `execute` method.")
            result = self._execute(requests)
            if result.__class__ is not list and isinstance(result, Coroutine):
                if self.decoupled:
                    self._run_in_background(result, requests)
                    result = None
                else:
                    result = self._event_loop().run(result)
            return self._checked(requests, result)
        except ModelFailed as error:  # our own text, which quotes no request
            text = self._text_for_clients(str(error), 1)
        except BaseException as error:
            # Also SystemExit: a model does not end its worker that way.
            text = self._text_for_clients(exception_text(error), len(requests))
        raise ModelFailed(text)

    def _text_for_clients(self, failed: str, count: int) -> str:
        """The text for the clients of `count` requests; the log gets the whole text.

        An exception may quote one request, which the other clients must not see.
        """
        text = f"Failed to process the request(s) for model '{self.name}', message: {failed}"
        if count == 1:
            self.runtime.channel.log(protocol.LOG_ERROR, text)
            return text
        mark = os.urandom(4).hex()
        self.runtime.channel.log(protocol.LOG_ERROR, f"error {mark}: {text}", always=True)  # clients get the mark
        return (
            f"Failed to process the request(s) for model '{self.name}', message: a batch of {count} requests failed; "
            f"the server's log says why, as error {mark}"
        )

    def _checked(self, requests: list[ReceivedRequest], responses: Any) -> list[InferenceResponse | None]:
        if responses is None:
            return [None] * len(requests)
        if self.decoupled:
            raise ModelFailed(
                f"Python model '{self.name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(responses, list):
            raise ModelFailed(f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(requests):
            raise ModelFailed(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}\n"
            )
        taken: list[InferenceResponseSender] = []
        try:
            for request, response in zip(requests, responses):
                if response is not None:
                    self._check(request, response)
                    if request._sender is not None:
                        take_final(request._sender, response)
                        taken.append(request._sender)
        except (ModelFailed, TritonModelException) as error:
            for sender in taken:
                reopen(sender)  # the whole batch fails
            raise ModelFailed(str(error)) from None
        return responses

    def _check(self, request: ReceivedRequest, response: Any) -> None:
        if request._release == RELEASE_RESCHEDULE:
            raise ModelFailed(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise ModelFailed(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )

    def unanswered(self, request: ReceivedRequest, text: str) -> bool:
        """Close the sender of a request after a failure. Returns whether DONE must say the error.

        A sender that has sent its final response needs none. One that has sent others says the error itself, because
        DONE could overtake them.
        """
        sender = request._sender
        if sender is None:
            return True
        if not close(sender):
            return False
        if not (sender._decoupled and sender._sent):
            return True
        self._fail(sender, text)
        return False

    def _fail(self, sender: InferenceResponseSender, text: str) -> None:
        response = InferenceResponse(error=TritonError(text))
        self.runtime.channel.respond(sender._key, response, True, sender._wanted)

    # -----------------------------------------------------------------------------------------------------------------
    # Coroutines

    def _event_loop(self) -> EventLoop:
        if self._loop is None:
            with self._starting:
                if self._loop is None:
                    self._loop = EventLoop(self.runtime)
        return self._loop

    def _run_in_background(self, coroutine: Coroutine[Any, Any, Any], requests: list[ReceivedRequest]) -> None:
        from concurrent.futures import CancelledError

        senders = [request._sender for request in requests]

        def done(future: Any) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                senders.clear()
                return
            text = self._text_for_clients(exception_text(error), len(senders))
            for sender in senders:
                if sender is not None and close(sender):
                    self._fail(sender, text)
            senders.clear()

        self._event_loop().start(coroutine).add_done_callback(done)


class EventLoop:
    """A thread with an event loop, for models whose methods are coroutines. It lives as long as the model."""

    def __init__(self, owner: runtime.Runtime) -> None:
        import asyncio

        self._loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._owner = owner
        self._tasks: set[Any] = set()  # the loop itself keeps no more than weak references
        threading.Thread(target=self._run, name="inferd-asyncio", daemon=True).start()

    def _run(self) -> None:
        import asyncio

        asyncio.set_event_loop(self._loop)
        runtime.use_on_this_thread(self._owner)
        self._loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it; the future of its result."""
        import asyncio

        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it and wait for its result."""
        return self.start(coroutine).result()

    def stop(self) -> None:
        """Stop the loop after its current callback."""
        self._loop.call_soon_threadsafe(self._loop.stop)
