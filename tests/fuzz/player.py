"""What a fuzzer makes up, played by a worker in the server's own process: any packets, between any requests.

A `Stage` is an engine whose Python models have workers that are nothing but the other ends of their sockets. `play`
takes bytes for a script, step after step: requests of clients, which may be given up, and packets, right and wrong.
What is asked of the server is the same for all scripts: every request gets one final answer, no memory of the arena
remains lent, and the next worker comes up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from inferd._native.memory.arena import ArenaHandle
from inferd.backends.python import attendant, process
from inferd.backends.python.arenas import arena_of
from inferd.backends.python.worker import protocol as p
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.python.hostile import ANY, KINDS, Hostile, ask, call, ok, status, tensor
from tests.engine.serving import CONFIG, Loader, echo, request, row

MODELS = ("m", "d")  # one response a request, or any number
DECOUPLED = """
model_transaction_policy { decoupled: true }
parameters { key: "decoupled_model_infer" value { string_value: "true" } }
"""
TO_CALM = request("calm", x=row(1)).SerializeToString()
TO_OWN = request("m", x=row(1)).SerializeToString()
PATIENCE = 60.0  # seconds for what must come
SOON = 0.02  # for what may come
STEPS = 64  # of a script
FLAGS = (0, p.FINAL, p.EMPTY, p.FINAL | p.EMPTY, p.IN_ARENA, p.IN_ARENA | p.FINAL, p.KEPT, p.FAILED)


class Gone(Exception):
    """The server has ended the worker."""


class Bytes:
    """A script, read number by number; zeros follow it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        """So many bytes."""
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece.ljust(size, b"\0")

    def byte(self) -> int:
        """A number below 256."""
        return self.take(1)[0]

    def number(self) -> int:
        """A number of 64 bits."""
        return int.from_bytes(self.take(8), "little")

    def one_of(self, choices: Any) -> Any:
        """A choice."""
        return choices[self.byte() % len(choices)]


class PlayedWorker(process.AnyWorker):
    """A worker that is no process: sockets, and something that tells its end."""

    hired: ClassVar[dict[str, queue.SimpleQueue[PlayedWorker]]] = {}

    def __init__(self, launch: process.Launch, arena: ArenaHandle) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        ends = [process.socket_pair(self._sockets) for _ in range(3)]
        self.work, self.side, self.calls = (end.fileno() for end, _ in ends)
        self.pid_fd, self._running = os.pipe2(os.O_CLOEXEC)
        self.hostile = Hostile(*(its.detach() for _, its in ends), os.dup(arena.fd))
        # What it says first, it says before it is listened to.
        self.hostile.send(self.hostile.work, p.HELLO, number=p.VERSION)
        self.hostile.send(self.hostile.work, p.READY, b"{}")
        self.hired[launch.name.partition("_")[0]].put(self)

    def end(self) -> None:
        """The stream has ended."""
        with self._lock:
            if self._running < 0:
                return
            for end in (self.hostile.work, self.hostile.side, self.hostile.calls):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            os.close(self._running)
            self._running = -1

    kill = kill_supervisor = end

    def await_end(self) -> str:
        """How it ended."""
        return "worker has ended"

    def close(self) -> None:
        """Close the server's descriptors."""
        self.end()
        for end in self._sockets:
            end.close()
        os.close(self.pid_fd)

    def leave(self) -> None:
        """Close its own; the player's part."""
        self.end()
        for end in (self.hostile.work, self.hostile.side, self.hostile.calls):
            end.close()
        self.hostile.memory.close()


class Stage:
    """The engine, on a thread of its own; a process has one.

    Args:
        root: an empty folder, for the models.
    """

    def __init__(self, root: Path) -> None:
        self._log = logging.getLogger("inferd")
        self._level = self._log.level
        self._log.setLevel(logging.CRITICAL)
        self._worker = attendant.Worker
        self._delay = attendant.FIRST_DELAY
        attendant.Worker = PlayedWorker  # type: ignore[misc, assignment]
        attendant.FIRST_DELAY = 0.0
        PlayedWorker.hired = {name: queue.SimpleQueue() for name in MODELS}
        configs = {name: CONFIG.replace("puppet", "python") for name in MODELS} | {"calm": CONFIG}
        configs["d"] += DECOUPLED
        for name, config in configs.items():
            (root / name / "1").mkdir(parents=True)
            (root / name / "config.pbtxt").write_text(config)
            (root / name / "1" / "model.py").touch()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: Engine = self._on_loop(self._start(root))
        self._next = {name: PlayedWorker.hired[name].get(timeout=PATIENCE) for name in MODELS}
        self._idle = {name: arena_of(name).used for name in MODELS}

    async def _start(self, root: Path) -> Engine:
        engine = Engine([root], Loader({"calm": echo}), Options())
        problems = await engine.start()
        assert not problems, problems
        return engine

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def close(self) -> None:
        """Close the engine."""
        for worker in self._next.values():
            worker.end()
        attendant.Worker = self._worker  # type: ignore[misc]
        self._on_loop(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        attendant.FIRST_DELAY = self._delay
        self._log.setLevel(self._level)

    def play(self, script: bytes) -> None:
        """Play a script, and see that nothing is left of it.

        Raises:
            AssertionError: something is.
        """
        data = Bytes(script)
        name = data.one_of(MODELS)
        worker = self._next[name]
        part = Part(self, name, worker.hostile, data)
        try:
            part.play()
        finally:
            self._replace(name)
        if part.finish(self._next[name].hostile, self._idle[name]):
            self._replace(name)  # this one has been told something

    def _replace(self, name: str) -> None:
        worker = self._next[name]
        worker.end()
        self._next[name] = PlayedWorker.hired[name].get(timeout=PATIENCE)
        worker.leave()

    def submit(self, message: pb.ModelInferRequest, deliver: Callable[..., None]) -> Any:
        """On the loop; the request's ticket."""

        async def submit() -> Any:
            return self.engine.infer.submit(message.SerializeToString(), deliver)

        return self._on_loop(submit())

    def cancel(self, ticket: Any) -> None:
        """The client gives its request up."""

        async def cancel() -> None:
            ticket.cancel()

        self._on_loop(cancel())


class Asked:
    """A request of a client."""

    def __init__(self, stage: Stage, name: str, values: int) -> None:
        self.answers: list[int] = []
        self.cancelled = False
        self.over = threading.Event()
        self._ticket = stage.submit(request(name, x=row(*range(values))), self._deliver)

    def _deliver(self, status: int, _text: str, _response: bytes | None) -> None:
        self.answers.append(status)
        self.over.set()

    def cancel(self, stage: Stage) -> None:
        """Give it up; nothing is delivered any more."""
        if not self.cancelled and not self.answers:
            stage.cancel(self._ticket)
            self.cancelled = True


class Part:
    """One script and what it has come to."""

    def __init__(self, stage: Stage, name: str, worker: Hostile, data: Bytes) -> None:
        self._stage = stage
        self._name = name
        self._worker = worker
        self._data = data
        self._asked: list[Asked] = []
        self._batch = 0  # that the worker has
        self._numbers: list[int] = []  # of the requests that it has got
        self._of_batch: list[int] = []
        self._places = [0, ANY]  # offsets that it has heard of
        self._calls = 0

    def play(self) -> None:
        """Play to the end of the script, or of the worker."""
        self._worker.receive_one(self._worker.work)  # CONFIGURE
        steps = (self._ask, self._read, self._packet, self._packet, self._done, self._allocate, self._respond,
                 self._hear, self._give_up, self._call)  # fmt: skip
        with contextlib.suppress(Gone, OSError):
            for _ in range(STEPS):
                if not self._data:
                    return
                self._data.one_of(steps)()

    def finish(self, successor: Hostile, idle: int) -> bool:
        """Each request has its one answer; the next worker answers those that the last one did not get.

        Args:
            successor: the next worker.
            idle: bytes of the arena that remain in use.

        Returns:
            Whether the next worker was asked anything.

        Raises:
            AssertionError: a request has no answer, or several, or memory is still lent.
        """
        waiting = [asked for asked in self._asked if not asked.cancelled]
        until = time.monotonic() + PATIENCE
        self._worker = successor
        served = False
        while (left := sum(not asked.over.is_set() for asked in waiting)) or arena_of(self._name).used > idle:
            lent = arena_of(self._name).used - idle
            assert time.monotonic() < until, f"{left} requests are not answered, {lent} bytes of the arena are lent"
            served = True
            self._of_batch = []
            self._read()
            self._serve()
        assert all(len(asked.answers) == 1 for asked in waiting), "a request is answered more than once"
        return served

    def _serve(self) -> None:
        """Answer the batch as it should be."""
        if not self._of_batch:
            return
        one = status(p.STATUS_OPEN) if self._name == "d" else ok(7)
        self._worker.send(self._worker.work, p.DONE, one * len(self._of_batch), number=self._batch)
        if self._name == "d":
            for number in self._of_batch:
                self._worker.send(self._worker.side, p.RESPONSE, ok(7), flags=p.FINAL, number=number)

    # -- the steps

    def _ask(self) -> None:
        self._asked.append(Asked(self._stage, self._name, self._data.one_of((1, 4, 9000))))

    def _give_up(self) -> None:
        if self._asked:
            self._data.one_of(self._asked).cancel(self._stage)

    def _hear(self) -> None:
        for of in (self._worker.side, self._worker.calls):
            while self._heard(of, 0):
                pass

    def _heard(self, of: socket.socket, seconds: float) -> tuple[int, int, int, int, int, bytes] | None:
        if not select.select([of], [], [], seconds)[0]:
            return None
        packet = self._worker.receive_one(of)
        if packet is None:
            raise Gone
        if packet[4]:
            self._places.append(packet[4])
        return packet

    def _read(self) -> None:
        """The next EXECUTE, if there will be one."""
        packet = self._heard(self._worker.work, SOON if self._asked else 0)
        if packet is None or packet[0] != p.EXECUTE:
            return
        self._batch, record = packet[3], packet[5]
        count, _, offset, _ = p.EXECUTE_HEAD.unpack_from(record)
        places = struct.unpack_from(f"<{count}I", record, p.EXECUTE_HEAD.size)
        self._of_batch = [p.REQUEST.unpack_from(record, at)[0] for at in places]
        self._numbers += self._of_batch
        self._places.append(offset)

    def _done(self) -> None:
        """DONE as it should be, but for what it says of each request."""
        kinds = (ok(7), status(p.STATUS_OPEN), status(p.STATUS_ERROR), status(p.STATUS_RESCHEDULE))
        records = [self._data.one_of(kinds) for _ in self._of_batch]
        self._worker.send(self._worker.work, p.DONE, b"".join(records), number=self._batch,
                          flags=self._data.one_of((0, p.KEPT)))  # fmt: skip
        self._of_batch = []

    def _allocate(self) -> None:
        of = self._data.one_of((self._worker.side, self._worker.work))
        self._worker.send(of, p.ALLOCATE, number=1, offset=self._data.one_of((1, 4096, 1 << 20, 1 << 40)))
        packet = self._heard(of, SOON)
        while packet is not None and packet[0] != p.ALLOCATED:
            packet = self._heard(of, SOON)

    def _respond(self) -> None:
        """A RESPONSE as it should be, to a request that the worker has or has had."""
        flags = self._data.one_of((0, p.FINAL, p.FINAL | p.EMPTY))
        number = self._data.one_of(self._numbers or [0])
        self._worker.send(self._worker.side, p.RESPONSE, b"" if flags & p.EMPTY else ok(7), flags=flags, number=number)

    def _call(self) -> None:
        """A call to another model, or what follows one."""
        self._calls += 1
        kind = self._data.byte() % 5
        if kind < 3:
            message = (TO_CALM, TO_OWN, b"")[kind]
            parent = self._data.one_of([0, *self._numbers])
            self._worker.send(self._worker.calls, p.BLS_REQUEST, call(message, parent=parent), number=self._calls,
                              flags=self._data.one_of((0, p.DECOUPLED)))  # fmt: skip
        else:
            self._worker.send(self._worker.calls, (p.BLS_CREDIT, p.BLS_CANCEL)[kind - 3], offset=1,
                              number=max(0, self._calls - self._data.byte() % 4))  # fmt: skip

    def _packet(self) -> None:
        """Any packet."""
        data = self._data
        to = data.one_of((self._worker.side, self._worker.work, self._worker.calls))
        kind = data.one_of((*KINDS, data.byte()))
        numbers = (0, self._batch, self._batch + 1, self._calls, data.byte(), *self._numbers)
        offset = data.one_of(self._places) + data.one_of((0, 0, 1, -1, 8, 1 << 20))
        record = self._record()
        flags = data.one_of((*FLAGS, data.byte()))
        if flags & p.IN_ARENA and 0 <= offset <= len(self._worker.memory) - len(record):
            if data.byte() % 2:
                self._worker.memory[offset : offset + len(record)] = record
            self._worker.send(to, kind, b"", flags=flags, code=data.byte(), number=data.one_of(numbers),
                              offset=offset, size=data.one_of((len(record), len(record) + 1, 0, 1 << 31)))  # fmt: skip
            return
        self._worker.send(to, kind, record, flags=flags, code=data.byte(), number=data.one_of(numbers),
                          offset=offset % (1 << 64), size=data.one_of((None, None, None, len(record) + 1)))  # fmt: skip

    def _record(self) -> bytes:
        data = self._data
        kind = data.byte() % 8
        if kind == 0:
            return b""
        if kind == 1:
            return data.take(data.byte())
        if kind == 2:
            return status(data.byte() % 6)
        if kind == 3:
            return call(data.take(data.byte() % 64), parent=data.one_of([0, *self._numbers]))
        if kind == 4:
            question = ("is_model_ready", "load_model", "unload_model", "metric_value", "")[data.byte() % 5]
            return ask(call=question, name=data.one_of(("calm", "nobody", "")), family="f", labels="{}")
        if kind == 5:
            operation = data.one_of(("family", "metric", "increment", "set", "delete_family", ""))
            change = {"family": "f", "description": "", "kind": "counter", "labels": {}, "value": 1}
            return json.dumps({"op": operation, **change}).encode()
        return self._tensor()

    def _tensor(self) -> bytes:
        data = self._data
        place = data.one_of((p.INLINE, p.ARENA, p.CUDA))
        shape = struct.unpack(f"<{2}b", data.take(2)) if data.byte() % 2 else (1, 1)
        return tensor(
            data.take(data.one_of((8, 8, 0, 16))),
            index=data.byte() % 3,
            datatype=data.byte() % 17,
            shape=shape,
            place=place,
            at=None if place == p.INLINE and data.byte() % 2 else data.one_of(self._places) % (1 << 64),
            size=data.one_of((None, 8, 16, 1 << 40)),
            status=data.byte() % 5,
            count=data.one_of((1, 1, 0, 2)),
            text=data.take(data.byte() % 8),
            text_size=data.one_of((None, None, 1 << 31)),
            total=data.one_of((None, None, 0, 1 << 20)),
        )
