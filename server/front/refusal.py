"""Sends errors: as gRPC's status and text, and with both again in a google.rpc.Status."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from inferd._native.refusal import count_refusal
from inferd._native.transport.errorinfo import rich_status
from inferd.server.errors import ServerError, status_and_text
from inferd.server.rpc.call import Metadata

STATUS_DETAILS = "grpc-status-details-bin"

MAX_DETAILS = 1024
"""The most characters of a status text. The text travels percent-encoded in a header, and clients refuse 16 KiB of
headers."""

CODES = {code.value[0]: code for code in grpc.StatusCode}


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> Any:
    """End the call with the status of `error`. Raises the exception by which the transport ends handlers."""
    status, text = status_and_text(error)
    trailers = (*(context.trailing_metadata() or ()), *rich_details(error))
    await context.abort(CODES[status], shortened(text), trailers)


def rich_details(error: BaseException) -> Metadata:
    """The trailing metadata with the status and the text of `error` in google.rpc.Status. Counts the refusal."""
    status, text = status_and_text(error)
    reason = error.reason if isinstance(error, ServerError) else ""
    if isinstance(error, ServerError) and not error.counted:
        count_refusal(status, reason)
    encoded = rich_status(status, shortened(text), reason)
    return ((STATUS_DETAILS, encoded),) if encoded else ()


def shortened(text: str) -> str:
    return text if len(text) <= MAX_DETAILS else f"{text[: MAX_DETAILS - 3]}..."
