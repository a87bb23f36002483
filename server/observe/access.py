"""The access log and the log of slow requests: one line for each request."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from inferd.server.errors import Status

access_log = logging.getLogger("inferd.access")
slow_log = logging.getLogger("inferd.slow")

_PLAIN = re.compile(r"""[^\s="']*""")
"""Texts that are written without quotes. Other texts, which clients may have chosen, could look like several fields."""


class AccessLog:
    """Writes both logs; an `inferd.server.observe.tracing.pump.Sink`.

    Args:
        slow_ns: requests that take longer are logged as slow; 0 for none.
    """

    def __init__(self, slow_ns: int) -> None:
        self._slow_ns = slow_ns

    def take(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if record["inner"]:
                continue
            if record["accessed"]:
                access_log.info("%s", _text(record), extra={"fields": fields(record)})
            if self._slow_ns and record["ended"] - record["arrived"] > self._slow_ns:
                slow_log.warning("slow: %s", _text(record), extra={"fields": fields(record)})

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """The logged values of a request; times in microseconds."""
    executed = record["taken"] != 0
    return {
        "peer": record["peer"],
        "method": record["method"],
        "model": record["model"],
        "version": record["version"],
        "request_id": record["request_id"],
        "trace_id": record["trace_id"] if record["traced"] else "",
        "status": Status(record["status"]).name,
        "responses": record["responses"] if record["method"] == "ModelStreamInfer" else 0,
        "received_bytes": record["received"],
        "sent_bytes": record["sent"],
        "queue_us": (record["taken"] - record["queued"]) // 1000 if executed else 0,
        "compute_us": (record["computed"] - record["taken"]) // 1000 if executed and record["computed"] else 0,
        "total_us": (record["ended"] - record["arrived"]) // 1000,
        "batch_size": record["batch_rows"],
        "cached": record["cached"],
    }


def _text(record: Mapping[str, Any]) -> str:
    said = fields(record)
    said["received_bytes"], said["sent_bytes"] = f"{said['received_bytes']}B", f"{said['sent_bytes']}B"
    model = f"{_word(said.pop('model'))}/{said.pop('version')}"
    head = f"{said.pop('peer')} {said.pop('method')} {model} {said.pop('status')}"
    return " ".join([head, *(f"{name}={_word(value)}" for name, value in said.items() if value not in ("", False))])


def _word(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
