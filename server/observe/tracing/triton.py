"""Traces as files of JSON, in the form that tritonserver writes.

A file is an array: for each request an object with its model, then one with its times, then one for each tensor. Times
are nanoseconds since 1970.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from server.observe.tracing.pump import Record

log = logging.getLogger("inferd.trace")

TIMES: Final = (
    ("REQUEST_START", "arrived"),
    ("QUEUE_START", "queued"),
    ("COMPUTE_START", "taken"),
    ("COMPUTE_INPUT_END", "input_end"),
    ("COMPUTE_OUTPUT_START", "output_start"),
    ("COMPUTE_END", "computed"),
    ("REQUEST_END", "ended"),
    ("INFER_RESPONSE_COMPLETE", "ended"),
)

_DTYPES: Final = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP32": "<f4",
    "FP64": "<f8",
}
"""Of which the data are written; those of FP16 and BF16 are not, as in Triton."""


class TraceFiles:
    """Writes them; a `server.observe.tracing.pump.Sink`.

    Args:
        file: its path; of several, without the number.
        frequency: gives the number of traces in a file; 0 for all in one.
    """

    def __init__(self, file: Path, frequency: Callable[[], int]) -> None:
        self._file = file
        self._frequency = frequency
        self._index = 0
        self._count = 0
        self._stream: TextIO | None = None

    def take(self, records: Sequence[Record]) -> None:
        for record in records:
            if not record["kept"]:
                continue
            stream = self._stream or self._open()
            stream.write(",\n" if self._count else "")
            stream.write(",\n".join(map(json.dumps, described(record))))
            self._count += 1
            frequency = self._frequency()
            if frequency and self._count >= frequency:
                self.close()
        if self._stream is not None:
            self._stream.flush()

    def close(self) -> None:
        """End the file that is open."""
        if self._stream is not None:
            self._stream.write("]\n")
            self._stream.close()
        self._stream, self._count = None, 0

    def _open(self) -> TextIO:
        path = self._file
        if self._frequency():
            path = path.with_name(f"{path.name}.{self._index}")
            self._index += 1
        self._stream = path.open("w", encoding="utf-8")
        self._stream.write("[")
        return self._stream


def described(record: Record) -> Iterator[dict[str, Any]]:
    """The objects of one request."""
    head = {"id": record["number"], "model_name": record["model"], "model_version": record["version"]}
    if record["request_id"]:
        head["request_id"] = record["request_id"]
    if record["parent"]:
        head["parent_id"] = record["parent"]
    yield head
    times = [{"name": name, "ns": record[key]} for name, key in TIMES if record[key]]
    yield {"id": record["number"], "timestamps": times}
    inputs, outputs = record["tensors"] or ((), ())
    for activity, tensors in (("TENSOR_QUEUE_INPUT", inputs), ("TENSOR_BACKEND_OUTPUT", outputs)):
        for tensor in tensors:
            shown = {
                "name": tensor["name"],
                "data": _data(tensor),
                "shape": ",".join(map(str, tensor["shape"])),
                "dtype": tensor["datatype"],
            }
            yield {"id": record["number"], "activity": activity, "tensor": shown}


def _data(tensor: Record) -> str:
    raw = tensor["data"]
    if raw is None:
        return ""
    if tensor["datatype"] == "BYTES":
        return ",".join(json.dumps(each.decode("utf-8", "replace")) for each in _strings(raw))
    dtype = _DTYPES.get(tensor["datatype"])
    return "" if dtype is None else ",".join(str(value) for value in np.frombuffer(raw, dtype))


def _strings(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        yield raw[at + 4 : at + 4 + size]
        at += 4 + size
