"""Runs a servicer's method for one call on the native front door, like grpc.aio."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from inferd._native.transport.call import CallOverError
from inferd.server.errors import status_and_text
from inferd.server.front.context import BlockingContext, NativeContext
from inferd.server.front.refusal import CODES

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

log = logging.getLogger("inferd.front")


async def serve(handler: Handler, context: NativeContext, threads: Executor) -> None:
    """Answer the call: run the method, send its responses, and end with the status that it leaves.

    Args:
        handler: the method.
        context: the call.
        threads: for methods that are not coroutines.
    """
    try:
        await _run(handler, context, threads)
    except grpc.aio.AbortError:
        context.finish(context.code() or grpc.StatusCode.INTERNAL, context.details())
    except CallOverError:
        pass  # the transport has ended it, with the reason
    except asyncio.CancelledError:
        context.finish(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        raise
    except Exception as error:
        log.exception("a handler failed")
        status, text = status_and_text(error)
        context.finish(CODES[status], text)
    else:
        context.finish(context.code() or grpc.StatusCode.OK, context.details())


async def _run(handler: Handler, context: NativeContext, threads: Executor) -> None:
    behaviour = _behaviour(handler)
    if inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour):
        await _run_async(handler, behaviour, context)
        return
    loop = asyncio.get_running_loop()
    blocking = BlockingContext(context, loop)
    request = blocking.requests() if handler.request_streaming else await context.read_only()
    await loop.run_in_executor(threads, _run_blocking, handler, behaviour, request, blocking)


def _behaviour(handler: Handler) -> Callable[..., Any]:
    if handler.request_streaming:
        found = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        found = handler.unary_stream if handler.response_streaming else handler.unary_unary
    assert found is not None
    return found


async def _request(handler: Handler, context: NativeContext) -> Any:
    return context.requests() if handler.request_streaming else await context.read_only()


async def _run_async(handler: Handler, behaviour: Callable[..., Any], context: NativeContext) -> None:
    # Only the method holds the request: a long call may drop it.
    if inspect.isasyncgenfunction(behaviour):
        responses = behaviour(await _request(handler, context), context)
        async for response in responses:
            await context.write(response)
        return
    response = await behaviour(await _request(handler, context), context)
    if not handler.response_streaming and context.code() in (None, grpc.StatusCode.OK):
        await context.answer(response)


def _run_blocking(handler: Handler, behaviour: Callable[..., Any], request: Any, context: BlockingContext) -> None:
    result = behaviour(request, context)
    if handler.response_streaming:
        for response in result:
            context.write(response)
    elif context.code() in (None, grpc.StatusCode.OK):
        context.answer(result)
