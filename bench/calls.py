"""The calls that bench.instructions counts: native ModelInfer calls, without sockets or an event loop.

    python -m bench.calls LOAD COUNT

The same bytes come in the same portions each time, and the requests of one portion make a batch. So the work does not
depend on how busy the machine is.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench import messages
from bench.micro import SPEC
from inferd._native.execution.instance import InstanceLoop
from inferd._native.request.bridge import BridgeHandle
from inferd._native.request.recorder import RecorderHandle
from inferd._native.scheduling.queue import QueueLane
from inferd._native.service.infer import InferService
from inferd._native.service.table import ModelTable
from inferd._native.transport.client import ClientUse
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd.backends.api import BatchingSpec, ModelSpec
from inferd.backends.identity import IdentityInstance

PATH = b"/inference.GRPCInferenceService/ModelInfer"
FIELDS = (  # those of gRPC's clients
    (b":authority", b"127.0.0.1:8001"),
    (b":path", PATH),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"user-agent", b"grpc-python/1.70.0 grpc-c/45.0.0 (linux; chttp2)"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
)
POST, HTTP = b"\x83", b"\x86"  # of HPACK's static table
FIRST_DYNAMIC = 62
HEADERS, DATA, SETTINGS, WINDOW_UPDATE = 1, 0, 4, 8
END_HEADERS, END_STREAM, ACK = 4, 1, 1
INITIAL_WINDOW = 4  # a setting
FRAME = 16_384  # bytes of a frame at most
PART = 256 << 10  # bytes that come at a time, at most
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST_CREDIT = (1 << 31) - 1 - 65_535


@dataclass(frozen=True, slots=True)
class Watched:
    """The settings of `RecorderHandle`. Nothing reads its records."""

    rate: int  # one call in `rate` is traced
    access: int = 0  # one call in `access` is logged
    slow: bool = False  # each ended call is checked: it may have been slow


@dataclass(frozen=True, slots=True)
class Load:
    """A load: `together` calls come at once, for one model; the next ones come when these are answered."""

    title: str
    together: int
    spec: ModelSpec
    watched: Watched | None = None
    size: int = 64  # bytes of the tensor, which comes back


LOADS = {
    "single": Load("one at a time", 1, SPEC),
    "batch": Load("32 at once", 32, SPEC),
    "delay": Load("32 at once, delay", 32, replace(SPEC, batching=BatchingSpec((32,), 1_000_000))),
    "sampled": Load("one at a time, one in 100 traced", 1, SPEC, Watched(100)),
    "slow": Load("one at a time, traced and logged where slow or failed", 1, SPEC, Watched(0, slow=True)),
    "traced": Load("one at a time, all traced and logged", 1, SPEC, Watched(1, access=1, slow=True)),
    # one batch; the answers, of more bytes than are written at once, wait for their turn
    "large": Load("4 of 600 kB at once", 4, replace(SPEC, batching=BatchingSpec((4,), 60_000_000)), size=600_000),
}


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """One frame of HTTP/2."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def requests(message: bytes) -> Iterator[bytes]:
    """The bytes of one call after the other on a connection; the first portion begins with the preface."""
    literal = b"".join(
        b"\x40" + len(name).to_bytes(1, "big") + name + len(value).to_bytes(1, "big") + value for name, value in FIELDS
    )
    indexed = bytes(0x80 | (FIRST_DYNAMIC + at) for at in reversed(range(len(FIELDS))))
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    parts = [framed[at : at + FRAME] for at in range(0, len(framed), FRAME)]
    window = INITIAL_WINDOW.to_bytes(2, "big") + ((1 << 31) - 1).to_bytes(4, "big")
    hello = PREFACE + frame(SETTINGS, 0, 0, window) + frame(SETTINGS, ACK, 0, b"")
    hello += frame(WINDOW_UPDATE, 0, 0, MOST_CREDIT.to_bytes(4, "big"))
    head, stream = hello + frame(HEADERS, END_HEADERS, 1, POST + HTTP + literal), 1
    while True:
        data = [frame(DATA, END_STREAM if part is parts[-1] else 0, stream, part) for part in parts]
        yield b"".join((head, *data))
        stream += 2
        head = frame(HEADERS, END_HEADERS, stream, POST + HTTP + indexed)


class Rig:
    """Native ModelInfer of one identity model, as the server puts it together, and one connection."""

    def __init__(self, load: Load) -> None:
        self.table = ModelTable()
        self.bridge = BridgeHandle()
        self.service = InferService(self.table, self.bridge)
        self.endpoint = Endpoint(
            lambda call: call.reset(),
            max_held_bytes=1 << 30,
            receive_timeout=30.0,
            send_timeout=30.0,
            timers=self.bridge.timers,
        )
        self.service.install(self.endpoint)
        if load.watched is not None:
            self.watch(load.watched)
        self.lane = QueueLane(load.spec, 1, max_queue=1000)
        self.table.set(load.spec.name, {1: self.lane})
        loop = InstanceLoop(self.lane, IdentityInstance((0, 0), True, False), "identity_0")
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()
        self.use = ClientUse("127.0.0.1", max_calls=1000, max_bytes=1 << 30)
        self.connection = Connection(self.endpoint, "ipv4:127.0.0.1:40000", use=self.use)
        self.connection.flush = self.connection.collect_output
        self.connection.take_output()  # its settings, which the client acknowledges
        self.expected = load.together * load.size  # bytes of a round's answers, without their heads
        self.requests = requests(messages.identity(load.size, load.spec.name).request)

    def watch(self, watched: Watched) -> None:
        """Have calls recorded."""
        recorder = RecorderHandle()
        recorder.sample(on=True, tensors=False, rate=watched.rate, count=-1)
        second = 10**9 if watched.slow else 0
        recorder.keep(access_rate=watched.access, slow_ns=second, log_slow_ns=second)
        recorder.switch(True)
        self.service.record(recorder)

    def round(self, count: int) -> bytes:
        """Feed `count` calls at once; return the bytes that are written back."""
        data = b"".join(next(self.requests) for _ in range(count))
        for at in range(0, len(data), PART):
            self.connection.receive(data[at : at + PART])
        while self.bridge.admitted_count:
            if not select.select([self.bridge.event_fd, self.bridge.timers.fd], [], [], 60)[0]:
                raise RuntimeError("an answer is missing")
            self.bridge.expire()
            self.bridge.drain()
        self.endpoint.flush_dirty()
        written = b"".join(map(bytes, self.connection.take_ready()))
        while len(written) < self.expected and (pieces := self.connection.take_output()):
            written += b"".join(map(bytes, pieces))
        return written

    def close(self) -> None:
        self.connection.close()
        self.lane.close()
        self.thread.join()
        self.bridge.drain()
        self.table.remove(SPEC.name)


def main() -> int:
    load, count = LOADS[sys.argv[1]], int(sys.argv[2])
    rig = Rig(load)
    rounds = count // load.together
    try:
        rig.round(load.together)
        os.getpriority(os.PRIO_PROCESS, 0)  # callgrind begins to count here
        for _ in range(rounds):
            answer = rig.round(load.together)
        os.getloadavg()  # and ends here
        if len(answer) < load.together * load.size:
            raise RuntimeError(f"{load.together} calls were answered with {len(answer)} bytes")
        made = rig.lane.statistics()["execution_count"]
        if made > 1.05 * (rounds + 1):  # else the instance sometimes took a batch early
            raise RuntimeError(f"expected {rounds + 1} batches, got {made}")
    finally:
        rig.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
