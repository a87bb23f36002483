"""The encoder of rich errors against official protobuf."""

from __future__ import annotations

import pytest

from inferd._native.transport.errorinfo import rich_status
from inferd.server.errors import Status
from tests import richerrors


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_every_status(status):
    rich = richerrors.read(rich_status(status, "text"))
    assert (rich.code, rich.message, rich.domain) == (status, "text", "inferd")
    assert rich.reason
    assert (rich.retry_seconds is not None) == (status is Status.UNAVAILABLE)


@pytest.mark.parametrize("text", ["", "x", "häßlich 🙂", "x" * 1024])
def test_texts(text):
    rich = richerrors.read(rich_status(14, text, "QUEUE_FULL"))
    assert (rich.message, rich.reason, rich.retry_seconds) == (text, "QUEUE_FULL", 0.1)


@pytest.mark.parametrize("text", ["x" * 1025, "ä" * 513])
def test_what_is_too_long_is_left_out(text):
    assert rich_status(3, text) == b""
