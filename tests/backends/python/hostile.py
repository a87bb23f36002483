"""A worker that plays by a script of the test instead of by the rules.

`environment` makes what EXECUTION_ENV_PATH may name: its bin/python is not an interpreter but `main` here. It loads no
model; it connects, and runs the test's script with a `Hostile` named `worker`. Any packet can be sent at any time.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import socket
import stat
import struct
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from inferd.backends.python.worker import protocol as p  # noqa: E402

INT64, BYTES = 9, 13
# A ModelInferRequest for the model itself, which waits as long as the model executes.
OWN = b"\x0a\x01m" + b"\x2a\x0e\x0a\x01x\x12\x05INT64\x1a\x02\x01\x01" + b"\x3a\x08" + bytes(8)
ANY = 1 << 30  # an offset of the arena that nothing lies at
KINDS = (p.DONE, p.ALLOCATE, p.RESPONSE, p.BLS_REQUEST, p.BLS_CANCEL, p.BLS_CREDIT, p.RELEASE, p.FREE, p.LOG, p.METRIC,
         p.CALL, p.HEALTH, p.CREDIT, p.STATISTICS)  # fmt: skip


@dataclass
class Batch:
    id: int
    numbers: list[int]
    grant: int  # offset of the grant for outputs
    grant_size: int


class Hostile:
    """The sockets and the arena of a worker."""

    def __init__(self, work: int, side: int, calls: int, arena: int) -> None:
        self.work, self.side, self.calls = (socket.socket(fileno=fd) for fd in (work, side, calls))
        self.memory = mmap.mmap(arena, 0)
        self.config: dict = {}
        self.call = 0  # number of the last call to another model

    # -- packets

    def send(self, to: socket.socket, kind: int, record: bytes = b"", *, flags: int = 0, code: int = 0, number: int = 0,
             offset: int = 0, size: int | None = None) -> None:  # fmt: skip
        """Any packet; `size` is what its head says of the record."""
        to.send(p.HEAD.pack(kind, flags, code, len(record) if size is None else size, number, offset) + record)

    def receive(self, of: socket.socket) -> tuple[int, int, int, int, int, bytes]:
        """The next packet: kind, flags, code, id, offset, record. The worker ends when the server is gone."""
        packet = self.receive_one(of)
        if packet is None:
            os._exit(0)
        return packet

    def receive_one(self, of: socket.socket) -> tuple[int, int, int, int, int, bytes] | None:
        """Receive one packet; None when the server is gone."""
        try:
            data = of.recv(p.PACKET)
        except OSError:
            data = b""
        if not data:
            return None
        kind, flags, code, size, number, offset = p.HEAD.unpack_from(data)
        record = self.memory[offset : offset + size] if flags & p.IN_ARENA else data[p.HEAD.size :]
        return kind, flags, code, number, offset, record

    # -- what a good worker does

    def start(self) -> None:
        """HELLO, CONFIGURE, READY."""
        self.send(self.work, p.HELLO, number=p.VERSION)
        self.config = json.loads(self.receive(self.work)[5])
        self.send(self.work, p.READY, b"{}")

    def batch(self) -> Batch:
        """The next EXECUTE."""
        kind, _, _, number, _, record = self.receive(self.work)
        if kind == p.FINALIZE:
            self.send(self.work, p.FINALIZED)
            os._exit(0)
        count, _, offset, size = p.EXECUTE_HEAD.unpack_from(record)
        offsets = struct.unpack_from(f"<{count}I", record, p.EXECUTE_HEAD.size)
        return Batch(number, [p.REQUEST.unpack_from(record, at)[0] for at in offsets], offset, size)

    def allocate(self, on: socket.socket, size: int) -> int:
        """A grant; -1: it is refused. What the server has been sent before on this socket it has read then."""
        self.send(on, p.ALLOCATE, number=1, offset=size)
        while True:
            kind, _, code, _, offset, _ = self.receive(on)
            if kind == p.ALLOCATED:
                return -1 if code else offset

    def done(self, batch: Batch, *records: bytes, flags: int = 0) -> None:
        """DONE with these responses."""
        self.send(self.work, p.DONE, b"".join(records), flags=flags, number=batch.id)

    def respond(self, number: int, record: bytes = b"", flags: int = 0) -> None:
        """RESPONSE; without a record, an empty one."""
        self.send(self.side, p.RESPONSE, record, flags=flags | (0 if record else p.EMPTY), number=number)

    def serve(self) -> None:
        """Answer every request as a good worker does, to the end."""
        while True:
            batch = self.batch()
            self.done(batch, *[ok(7) for _ in batch.numbers])

    def storm(self, seed: int, right: float = 0.9) -> None:
        """Serve, and between that send packets of all kinds at random on all sockets.

        Args:
            seed: of the chance.
            right: how likely each packet is one that a worker may send, if it comes in time.
        """
        chance = random.Random(seed)
        while True:
            batch = self.batch()
            grants = [self.allocate(chance.choice((self.work, self.side)), chance.choice((1, 4096, 1 << 20)))]
            for _ in range(chance.randrange(12)):
                if chance.random() < right:
                    self._right(chance, batch, grants)
                else:
                    self._any(chance, batch, grants)
            self.done(batch, *[ok(7) for _ in batch.numbers])

    def _right(self, chance: random.Random, batch: Batch, grants: list[int]) -> None:
        kind = chance.choice((p.ALLOCATE, p.FREE, p.LOG, p.METRIC, p.CALL, p.HEALTH, p.CREDIT, p.BLS_REQUEST,
                              p.BLS_CANCEL))  # fmt: skip
        if kind == p.ALLOCATE:
            grants.append(self.allocate(self.side, chance.randrange(1 << 16)))
        elif kind == p.FREE:
            self.send(self.side, kind, offset=self.allocate(self.side, 1))
        elif kind == p.LOG:
            self.send(self.side, kind, b"\xff\n" * chance.randrange(9), code=chance.randrange(9))
        elif kind == p.METRIC:
            self.send(self.side, kind, b'{"op": "nothing"}')
        elif kind == p.CALL:
            self.send(self.side, kind, ask(call="is_model_ready", name="calm"), number=chance.randrange(9))
        elif kind == p.BLS_REQUEST:
            self.call += 1
            self.send(self.calls, kind, call(chance.randbytes(chance.randrange(40))), number=self.call)
        elif kind == p.BLS_CANCEL:
            self.send(self.calls, kind, number=self.call)
        else:
            self.send(self.side, kind, number=chance.choice(batch.numbers))

    def _any(self, chance: random.Random, batch: Batch, grants: list[int]) -> None:
        kind = chance.choice((*KINDS, chance.randrange(256)))
        records = (b"", ok(7), status(chance.randrange(5)), call(b"x"), tensor(b"", place=p.ARENA, at=ANY, size=8))
        record = chance.choice(records)
        if chance.random() < 0.3:
            record = record[: chance.randrange(len(record) + 1)] + chance.randbytes(chance.randrange(64))
        flags = chance.choice((0, 0, p.FINAL, p.EMPTY, p.FINAL | p.EMPTY, p.IN_ARENA, p.KEPT, chance.randrange(256)))
        numbers = (0, batch.id, batch.id + 1, *batch.numbers, chance.randrange(1 << 64))
        offset = chance.choice((0, 1, ANY, batch.grant, *grants, chance.randrange(1 << 64)))
        size = chance.choice((None, None, 0, 64, chance.randrange(1 << 32)))
        self.send(chance.choice((self.work, self.side, self.calls)), kind, record, flags=flags,
                  code=chance.randrange(1 << 16), number=chance.choice(numbers), offset=offset, size=size)  # fmt: skip

    def wait(self) -> None:
        """Say no more; end with the server."""
        while True:
            self.receive(self.work)


def ok(value: int) -> bytes:
    """A response with the output [[value]]."""
    return tensor(struct.pack("<q", value))


def tensor(
    data: bytes,
    *,
    index: int = 0,
    datatype: int = INT64,
    shape: tuple[int, ...] = (1, 1),
    place: int = p.INLINE,
    at: int | None = None,
    size: int | None = None,
    status: int = p.STATUS_OK,
    count: int = 1,
    text: bytes = b"",
    text_size: int | None = None,
    total: int | None = None,
) -> bytes:
    """A response with one output, or something that looks like it. `at`: offset of the data, by default behind it."""
    head = p.RESPONSE_HEAD.size + p.TENSOR.size + 8 * len(shape)
    body = head + len(text)
    offset = body if at is None else at
    out = p.TENSOR.pack(index, datatype, len(shape), place, offset, len(data) if size is None else size)
    out += struct.pack(f"<{len(shape)}q", *shape) + text + data
    out += bytes(-(p.RESPONSE_HEAD.size + len(out)) % 8)
    whole = p.RESPONSE_HEAD.size + len(out) if total is None else total
    return p.RESPONSE_HEAD.pack(status, 0, count, len(text) if text_size is None else text_size, 0, whole) + out


def status(value: int) -> bytes:
    """A response that is nothing but a status."""
    return p.RESPONSE_HEAD.pack(value, 0, 0, 0, 0, p.RESPONSE_HEAD.size)


def call(message: bytes, *, parent: int = 0, size: int | None = None) -> bytes:
    """The record of a BLS_REQUEST."""
    return p.BLS_HEAD.pack(parent, 0, len(message) if size is None else size, 0) + message


def ask(**question: str) -> bytes:
    """The record of a CALL."""
    text = json.dumps(question).encode()
    return p.CALL_HEAD.pack(len(text)) + text


def environment(folder: Path, script: str, again: bool = False) -> Path:
    """An environment whose workers run the script.

    Args:
        folder: where to make it.
        script: with a `Hostile` named `worker`.
        again: the later workers do, too; otherwise they serve as they should.
    """
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    (folder / "script.py").write_text(textwrap.dedent(script))
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.append({str(ROOT)!r})\n"
        f"from tests.backends.python.hostile import main\nmain({str(folder)!r}, {again})\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def main(folder: str, again: bool) -> None:
    """The program of such an environment."""
    worker = Hostile(*map(int, sys.argv[2:6]))
    worker.start()
    flag = Path(folder) / "has-misbehaved"
    if flag.exists() and not again:
        worker.serve()
    flag.touch()
    names = {"worker": worker, "p": p, "ok": ok, "tensor": tensor, "status": status, "call": call, "ask": ask,
             "ANY": ANY, "OWN": OWN, "BYTES": BYTES, "INT64": INT64, "struct": struct, "os": os}  # fmt: skip
    exec((Path(folder) / "script.py").read_text(), names)
    worker.wait()
