"""Traces as files of JSON, in the form that tritonserver writes.

A file is an array: for each request an object with its model, then one with its times, then one for each tensor. Times
are nanoseconds since 1970.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from inferd.server.observe.files import opened, write_all
from inferd.server.observe.tracing.pump import Record

log = logging.getLogger("inferd.trace")

MODE = 0o600  # of the files, since traces can contain the tensors of requests

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
"""Datatypes whose data are written; as in Triton, those of FP16 and BF16 are not."""


class TraceFiles:
    """Writes traces; an `inferd.server.observe.tracing.pump.Sink`.

    Args:
        file: the path; if there may be several files, their names have a number behind it.
        frequency: returns the number of traces in a file; 0: all in one file.
    """

    def __init__(self, file: Path, frequency: Callable[[], int]) -> None:
        self._file = file
        self._frequency = frequency
        self._index = 0
        self._count = 0
        self._size = 0  # of the file's complete part
        self._lost = 0  # traces since the last written one
        self._descriptor = -1

    def check(self) -> None:
        """Check that the file can be written, without changing it.

        Raises:
            OSError: it cannot be written.
        """
        existed = self._file.exists()
        os.close(opened(self._file, 0, mode=MODE))
        if not existed:
            self._file.unlink()

    def take(self, records: Sequence[Record]) -> None:
        for record in records:
            if not record["kept"]:
                continue
            text = ",\n".join(map(json.dumps, described(record)))
            self._add(text.encode())
            frequency = self._frequency()
            if frequency and self._count >= frequency:
                self.close()

    def close(self) -> None:
        """End the file that is open."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._write(b"]\n")
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor, self._count, self._size = -1, 0, 0

    def _add(self, trace: bytes) -> None:
        """Write a trace. If that fails, restore the file and count the trace as lost."""
        try:
            if self._descriptor < 0:
                self._open()
            self._write((b",\n" if self._count else b"[") + trace)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                log.error("traces are lost: they cannot be written to %s: %s", self._file, error.strerror)
            return
        self._count += 1
        if self._lost:
            log.warning("traces are written again, %d were lost", self._lost)
            self._lost = 0

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._descriptor, data)
        except OSError:
            with contextlib.suppress(OSError):  # a device, which has no size
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += len(data)

    def _open(self) -> None:
        path, numbered = self._file, bool(self._frequency())
        if numbered:
            path = path.with_name(f"{path.name}.{self._index}")
        self._descriptor = opened(path, os.O_TRUNC, mode=MODE)
        self._index += numbered


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
