"""Sends errors: as gRPC's status and text, and with both again in a google.rpc.Status."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from inferd._native.refusal import count_refusal
from inferd._native.transport.call import STATUS_DETAILS
from inferd._native.transport.errorinfo import rich_status
from inferd.server.errors import ServerError, status_and_text
from inferd.server.rpc.call import Metadata

MAX_DETAILS = 1024
"""The most bytes of a status text. It travels percent-encoded in a header, and again in a google.rpc.Status; clients
refuse 16 KiB of headers."""

CODES = {code.value[0]: code for code in grpc.StatusCode}


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> Any:
    """End the call with the status of `error`. Raises the exception by which the transport ends handlers."""
    status, text = status_and_text(error)
    trailers = (*(context.trailing_metadata() or ()), *rich_details(error))
    await context.abort(CODES[status], shortened(text), trailers)


def rich_details(error: BaseException) -> Metadata:
    """The trailing metadata with the status and the text of `error` in google.rpc.Status. Counts the refusal, unless it
    has been counted."""
    status, text = status_and_text(error)
    refusal = error.refusal if isinstance(error, ServerError) else 0
    if not (isinstance(error, ServerError) and error.counted):
        count_refusal(status, refusal)
    encoded = rich_status(status, shortened(text), refusal)
    return ((STATUS_DETAILS, encoded),) if encoded else ()


def shortened(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_DETAILS:
        return text
    return encoded[: MAX_DETAILS - 3].decode("utf-8", "ignore") + "..."
