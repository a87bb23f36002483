"""A server's end of the wire, in plain Python: starts a worker process and speaks `protocol` with it.

Nothing of the server is involved, so what the worker does can be seen packet by packet.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inferd.backends.python.worker import protocol as p
from inferd.backends.python.worker.datatypes import BYTES, dtype_of, number_of
from inferd.backends.python.worker.strings import pack_array, unpack_array

WORKER = Path(__file__).parents[3] / "backends" / "python" / "worker" / "__main__.py"
ARENA = 64 << 20
FLAGS = 64 << 10
GRANT = 1 << 20  # where grants begin; requests lie before


@dataclass
class Packet:
    kind: int
    flags: int
    code: int
    id: int
    offset: int
    record: bytes

    def json(self) -> Any:
        return json.loads(self.record)

    def text(self) -> str:
        return self.record.decode()

    def call(self) -> tuple[Any, bytes]:
        """The content of a CALL, and its files."""
        (size,) = p.CALL_HEAD.unpack_from(self.record)
        end = p.CALL_HEAD.size + size
        return json.loads(self.record[p.CALL_HEAD.size : end]), self.record[end:]


@dataclass
class Sent:
    """A request to send; `extra` are the fields of EXTRA."""

    inputs: dict[str, np.ndarray]
    number: int = 0
    flags: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    status: int
    code: int = 0
    error: str = ""
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)


class Peer:
    """One worker.

    Args:
        folder: an empty one, which becomes the model's.
        source: of model.py.
        inputs, outputs: datatype by name.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        inputs: dict[str, str],
        outputs: dict[str, str],
        *,
        python: str = sys.executable,
        decoupled: bool = False,
        window: int = 4,
        args: dict[str, str] | None = None,
        file: str = "model.py",
        **config: Any,
    ) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.datatypes = {**inputs, **outputs}
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / file).write_text(textwrap.dedent(source))
        self.work, work = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.side, side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.calls, calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arena = os.memfd_create("test")
        os.ftruncate(arena, ARENA)
        self.arena = mmap.mmap(arena, ARENA)
        self.granted = GRANT
        self.most = ARENA  # bytes of a grant; for more there is no memory
        self.numbers = iter(range(0x10001, 0x20000))
        inherited = (work.fileno(), side.fileno(), calls.fileno(), arena)
        self.process = subprocess.Popen(
            [python, str(WORKER), *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for end in (work, side, calls):
            end.close()
        os.close(arena)
        self.work.settimeout(60)
        self.side.settimeout(60)
        self.calls.settimeout(60)
        self.config = {
            "mode": "serve",
            "model_file": str(version / file),
            "model_dir": str(version),
            "args": {
                "model_name": "m",
                "model_instance_name": "m_0_0",
                "model_version": "1",
                "model_config": "{}",
                **(args or {}),
            },
            "config": {},
            "inputs": [{"name": name, "datatype": 0, "dims": []} for name in inputs],
            "outputs": [{"name": name, "datatype": 0, "dims": []} for name in outputs],
            "max_batch_size": 8,
            "decoupled": decoupled,
            "window": window,
            "flags": FLAGS,
            "log_verbose": False,
            "cuda_driver": "libcuda.so.1",
            "patience": 0.0,
            "explicit_control": False,
            **config,
        }

    # -- packets

    def send(self, to: socket.socket, kind: int, record: bytes = b"", *, flags: int = 0, code: int = 0, number: int = 0,
             offset: int = 0) -> None:  # fmt: skip
        size = len(record)
        if flags & p.IN_ARENA:
            self.arena[offset : offset + size] = record
            record = b""
        to.send(p.HEAD.pack(kind, flags, code, size, number, offset) + record)

    def receive(self, of: socket.socket) -> Packet:
        data = of.recv(p.PACKET)
        assert data, f"the worker is gone: {self.errors()}"
        kind, flags, code, size, number, offset = p.HEAD.unpack_from(data)
        record = data[p.HEAD.size :]
        if flags & p.IN_ARENA:
            record = self.arena[offset : offset + size]
        assert len(record) == size
        return Packet(kind, flags, code, number, offset, record)

    def errors(self) -> str:
        return self.process.communicate(timeout=30)[1]

    def expect(self, of: socket.socket, kind: int) -> Packet:
        """The next packet, which must be of this kind; requests for memory are answered, logs skipped."""
        while True:
            packet = self.receive(of)
            if packet.kind == kind:
                return packet
            if packet.kind == p.ALLOCATE and packet.offset > self.most:
                self.send(of, p.ALLOCATED, number=packet.id, code=p.CODE_UNAVAILABLE)
            elif packet.kind == p.ALLOCATE:
                self.send(of, p.ALLOCATED, number=packet.id, offset=self.grant(packet.offset))
            else:
                assert packet.kind == p.LOG, f"kind {packet.kind}: {packet.record!r}"

    def grant(self, size: int) -> int:
        offset = self.granted
        self.granted += (size + 63) & -64
        return offset

    # -- life

    def configure(self) -> dict[str, Any]:
        hello = self.receive(self.work)
        assert (hello.kind, hello.id) == (p.HELLO, p.VERSION)
        self.send(self.work, p.CONFIGURE, json.dumps(self.config).encode())
        said = self.expect(self.work, p.READY).json()
        assert isinstance(said, dict)
        return said

    def finalize(self) -> tuple[str, str]:
        """End the worker; its standard output and error."""
        self.send(self.work, p.FINALIZE)
        self.expect(self.work, p.FINALIZED)
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return out, err

    def close(self) -> None:
        self.work.close()
        self.side.close()
        self.calls.close()
        self.process.kill()
        self.process.communicate()
        self.arena.close()

    # -- execution

    def execute(self, *requests: Sent, grant: int = 0, arena: bool = False) -> list[Answer]:
        """Send a batch and wait until it is done. `arena`: inputs lie in the arena."""
        self.start(*requests, grant=grant, arena=arena)
        return self.done()

    def start(self, *requests: Sent, grant: int = 0, arena: bool = False, number: int = 7) -> None:
        head = bytearray(p.align(p.EXECUTE_HEAD.size + 4 * len(requests)))
        record = bytearray(head)
        offsets = []
        at = FLAGS + p.SLOTS
        self.sent_at = []
        for request in requests:
            request.number = request.number or next(self.numbers)
            data = []
            offsets.append(len(record))
            tensors_at = len(record) + p.REQUEST.size
            sizes = sum(p.TENSOR.size + 8 * array.ndim for array in request.inputs.values())
            body = tensors_at + sizes
            heads = b""
            for name, array in request.inputs.items():
                number_of_type, content = encode(array)
                place, offset = (p.ARENA, at) if arena else (p.INLINE, body + sum(map(len, data)))
                heads += p.TENSOR.pack(
                    self.inputs.index(name), number_of_type, array.ndim, place, offset, len(content)
                ) + struct.pack(f"<{array.ndim}q", *array.shape)
                if arena:
                    self.sent_at.append(at)
                    self.arena[at : at + len(content)] = content
                    at += p.align(len(content))
                else:
                    data.append(content + bytes(-len(content) & 7))
            body += sum(map(len, data))
            extra = body if request.extra else 0
            record += p.REQUEST.pack(request.number, request.flags, len(request.inputs), 0, extra, 0)
            record += heads + b"".join(data)
            if request.extra:
                record += self.extra(**request.extra)
                record += bytes(-len(record) & 7)
        offset = self.grant(grant) if grant else 0
        p.EXECUTE_HEAD.pack_into(record, 0, len(requests), len(requests), offset, grant)
        struct.pack_into(f"<{len(offsets)}I", record, p.EXECUTE_HEAD.size, *offsets)
        if len(record) > p.PACKET - p.HEAD.size:
            self.send(self.work, p.EXECUTE, bytes(record), flags=p.IN_ARENA, number=number, offset=32 << 20)
        else:
            self.send(self.work, p.EXECUTE, bytes(record), number=number)

    def extra(
        self,
        timeout: int = 0,
        priority: int = 0,
        correlation: int | str = 0,
        wanted: Sequence[str] | None = None,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        trace: str = "",
    ) -> bytes:
        text = correlation if isinstance(correlation, str) else ""
        number = correlation if isinstance(correlation, int) else 0
        texts = [part.encode() for part in (request_id, text, json.dumps(parameters) if parameters else "", trace)]
        indices = [self.outputs.index(name) for name in wanted or ()]
        count = p.ALL_OUTPUTS if wanted is None else len(indices)
        return (
            p.EXTRA.pack(timeout, priority, number, count, *map(len, texts), 0)
            + struct.pack(f"<{len(indices)}H", *indices)
            + b"".join(texts)
        )

    def done(self) -> list[Answer]:
        packet = self.expect(self.work, p.DONE)
        self.kept = bool(packet.flags & p.KEPT)
        assert not packet.flags & p.FAILED
        return self.answers(packet.record)

    def answers(self, record: bytes) -> list[Answer]:
        out = []
        at = 0
        while at < len(record):
            answer, at = self.answer(record, at)
            out.append(answer)
        return out

    def answer(self, record: bytes, at: int) -> tuple[Answer, int]:
        status, code, tensors, text, parameters, total = p.RESPONSE_HEAD.unpack_from(record, at)
        end = at + total
        at += p.RESPONSE_HEAD.size
        answer = Answer(status, code)
        for _ in range(tensors):
            index, datatype, rank, place, offset, size = p.TENSOR.unpack_from(record, at)
            at += p.TENSOR.size
            shape = struct.unpack_from(f"<{rank}q", record, at)
            at += 8 * rank
            source = self.arena if place == p.ARENA else record
            name = self.outputs[index]
            answer.outputs[name] = decode(datatype, shape, source[offset : offset + size])
            answer.places[name] = place
            answer.offsets[name] = offset
        answer.error = record[at : at + text].decode()
        at += text
        answer.parameters = read_parameters(record[at : at + parameters])
        assert end % 8 == 0
        return answer, end

    def response(self) -> tuple[Packet, Answer | None]:
        """The next RESPONSE of the side socket."""
        packet = self.expect(self.side, p.RESPONSE)
        if packet.flags & p.EMPTY:
            return packet, None
        (answer,) = self.answers(packet.record)
        return packet, answer


def encode(array: np.ndarray) -> tuple[int, bytes]:
    number = number_of(array.dtype)
    return number, pack_array(array) if number == BYTES else array.tobytes()


def decode(datatype: int, shape: tuple[int, ...], content: bytes) -> np.ndarray:
    if datatype == BYTES:
        return unpack_array(content, shape)
    return np.frombuffer(content, dtype_of(datatype)).reshape(shape)


def read_parameters(data: bytes) -> dict[str, Any]:
    out: dict[str, Any] = {}
    at = 0
    while at < len(data):
        name, kind, _, text = p.PARAMETER.unpack_from(data, at)
        at += p.PARAMETER.size
        bits = data[at : at + 8]
        at += 8
        key = data[at : at + name].decode()
        at += name
        out[key] = {
            p.PARAMETER_BOOL: lambda bits=bits: bool(struct.unpack("<q", bits)[0]),
            p.PARAMETER_INT64: lambda bits=bits: struct.unpack("<q", bits)[0],
            p.PARAMETER_UINT64: lambda bits=bits: struct.unpack("<Q", bits)[0],
            p.PARAMETER_DOUBLE: lambda bits=bits: struct.unpack("<d", bits)[0],
            p.PARAMETER_STRING: lambda at=at, text=text: data[at : at + text].decode(),
        }[kind]()
        at += text
    return out


@contextmanager
def worker(
    folder: Path,
    source: str,
    inputs: dict[str, str] | None = None,
    outputs: dict[str, str] | None = None,
    **config: Any,
) -> Iterator[Peer]:
    """A worker that has loaded its model."""
    peer = Peer(folder, source, inputs or {"IN": "FP32"}, outputs or {"OUT": "FP32"}, **config)
    try:
        said = peer.configure()
        assert "error" not in said, said["error"]
        yield peer
    finally:
        peer.close()
