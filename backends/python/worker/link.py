"""The worker's end of the transport: three sockets and the arena, as `protocol` describes them."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import threading
import time
from typing import Any, Callable, NoReturn

from . import protocol as p
from .channel import Waiter
from .errors import TritonModelException

_HEAD = p.HEAD
_HEAD_SIZE = p.HEAD.size
INLINE_LIMIT = p.PACKET - _HEAD_SIZE
"""Bytes of a record that fit into a packet."""
COPIED = 4096
"""Up to so many bytes of a record, joining it to the head and sending both is faster than `sendmsg`."""


class Packet:
    """A packet that came in. The record is in `data`, which belongs to the receiver, or in the arena."""

    __slots__ = ("code", "data", "flags", "id", "kind", "offset", "size")

    def __init__(self, received: memoryview) -> None:
        self.kind, self.flags, self.code, self.size, self.id, self.offset = _HEAD.unpack_from(received)
        # A bytearray, because the model may write to tensors in it; a copy, because the model may keep them.
        self.data = bytearray(received[_HEAD_SIZE:])


MOST_DOUBTS, ENOUGH_DOUBTS = 8, 6
RARELY = 8
"""After many polls in vain, one poll in this number still happens."""


class Look:
    """Polls a socket for its next packet before the thread sleeps, as long as packets come soon enough.

    If fewer than a third do, polling takes CPU time from others, such as the models that this model calls: then most
    polls are skipped.
    """

    __slots__ = ("_doubts", "_left_out", "_of")

    def __init__(self, of: socket.socket) -> None:
        self._of = of
        self._doubts = 0  # one more for each poll in vain, two less for any other
        self._left_out = 0  # polls since the last one that happened

    def for_packet(self, buffer: memoryview, patience: float) -> int:
        """The size of a packet that comes within this time; 0: none came, the poll was skipped, or the socket ended."""
        if self._doubts >= ENOUGH_DOUBTS:
            self._left_out += 1
            if self._left_out < RARELY:
                return 0
            self._left_out = 0
        until = time.monotonic() + patience
        while True:
            try:
                size = self._of.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:  # noqa: PERF203 (it is what is waited for)
                if time.monotonic() >= until:
                    self._doubts = min(self._doubts + 1, MOST_DOUBTS)
                    return 0
                os.sched_yield()  # to other work on this core, perhaps the packet's sender
            else:
                self._doubts = max(self._doubts - 2, 0)
                return size


class Link:
    """Sockets and arena. Sending is safe from any thread: a packet goes out whole.

    Args:
        work, side, calls, arena: the descriptors, which become the link's.
        gone: any thread calls it when the server is gone; it does not return.

    Attributes:
        patience: seconds for which a thread polls for its next packet before it sleeps; about the time that sleeping
            and waking take on an idle core of a virtual machine.
    """

    def __init__(self, work: int, side: int, calls: int, arena: int, gone: Callable[[], NoReturn]) -> None:
        self.patience = 0.0
        self._gone = gone
        self.on_forget: Callable[[int], None] = _nothing  # takes the numbers of closed regions
        self.forked = False  # this process is a fork, which may not use the link
        self.work = socket.socket(fileno=work)
        self.side = socket.socket(fileno=side)
        self.calls = socket.socket(fileno=calls)
        # Only on these sockets does a packet follow soon after one was sent, so only these are polled.
        self._looks = {each: Look(each) for each in (self.work, self.calls)}
        self.arena = mmap.mmap(arena, 0)
        self.memory = memoryview(self.arena)
        os.close(arena)
        self._ids = itertools.count(1)
        self._buffer = memoryview(bytearray(p.PACKET))

    def close(self) -> None:
        """Close the sockets. The arena stays mapped as long as a tensor lies in it."""
        self.work.close()
        self.side.close()
        self.calls.close()

    def next_id(self) -> int:
        """An unused number."""
        return next(self._ids)

    def send(self, to: socket.socket, kind: int, record: Any = b"", *, flags: int = 0, code: int = 0, number: int = 0,
             offset: int = 0) -> None:  # fmt: skip
        """Send a packet; the record must fit into it."""
        if self.forked:
            return
        size = len(record)
        head = _HEAD.pack(kind, flags, code, size, number, offset)
        try:
            if size <= COPIED:
                to.send(head + record)
            else:
                to.sendmsg((head, record))
        except OSError:  # also EBADF, of a closed link
            self._gone()

    def send_arena(self, to: socket.socket, kind: int, offset: int, size: int, *, flags: int = 0, code: int = 0,
                   number: int = 0) -> None:  # fmt: skip
        """Send a packet whose record lies in the arena."""
        if self.forked:
            return
        try:
            to.send(_HEAD.pack(kind, flags | p.IN_ARENA, code, size, number, offset))
        except OSError:  # also EBADF, of a closed link
            self._gone()

    def receive_work(self) -> Packet:
        """The next packet of the work socket other than FORGET, which it handles. Only the main thread calls it."""
        while True:
            packet = self.receive(self.work, self._buffer)
            if packet.kind != p.FORGET:
                return packet
            self.on_forget(packet.id)

    def record(self, packet: Packet) -> bytes:
        """The record of a packet as bytes."""
        if packet.flags & p.IN_ARENA:
            return bytes(self.memory[packet.offset : packet.offset + packet.size])
        return bytes(packet.data)

    def receive(self, of: socket.socket, buffer: memoryview) -> Packet:
        """Wait for the next packet. The worker ends when the server has closed the socket.

        Raises:
            TritonModelException: in a fork, which gets none.
        """
        if self.forked:
            self.require()
        try:
            look = self._looks.get(of) if self.patience else None
            size = (look is not None and look.for_packet(buffer, self.patience)) or of.recv_into(buffer)
        except OSError:
            size = 0
        if size == 0:
            self._gone()
        return Packet(buffer[:size])

    def require(self) -> None:
        """Check that this process may receive.

        Raises:
            TritonModelException: in a fork, which gets nothing.
        """
        if self.forked:
            raise TritonModelException("a process that the model has forked has no connection to the server")


class Reader:
    """Reads a socket on which several threads wait: one waiting thread reads, and passes the others their packets.

    So a model that calls others only from `execute` needs no other thread, and its calls wake none. For packets
    for which no thread waits, `read_always` starts a thread that reads from then on.

    Args:
        link: the transport.
        of: its socket.
        dispatch: takes each packet, on the thread that has read it.
        name: of the thread.
    """

    def __init__(self, link: Link, of: socket.socket, dispatch: Callable[[Packet], None], name: str) -> None:
        self._link = link
        self._socket = of
        self._name = name
        self._dispatch = dispatch
        self._buffer = memoryview(bytearray(p.PACKET))
        self._reading = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wait(self, waiter: Waiter) -> None:
        """Wait until the waiter is done."""
        if not waiter.done and self._begin():
            self._read_until(waiter)
        if not waiter.done:
            self._wait_for_others(waiter)

    def _wait_for_others(self, waiter: Waiter) -> None:
        self._link.require()
        waiter.prepare()
        self._waiters.add(waiter)  # before trying the lock: the thread that releases it looks here for a successor
        try:
            while not waiter.done:
                if self._begin():
                    self._read_until(waiter)
                else:
                    waiter.sleep()
        finally:
            self._waiters.discard(waiter)

    def _begin(self) -> bool:
        """Become the reading thread; False if another thread is."""
        return self._thread is None and self._reading.acquire(blocking=False)

    def _read_until(self, waiter: Waiter) -> None:
        try:
            while not waiter.done and self._thread is None:
                self._dispatch(self._link.receive(self._socket, self._buffer))
        finally:
            self._reading.release()
            if self._waiters:
                self._wake_another(waiter)

    def _wake_another(self, waiter: Waiter) -> None:
        for other in list(self._waiters):
            if not other.done and other is not waiter:
                other.wake()
                return

    def read_always(self) -> None:
        """From now on, have a thread always read."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()  # raises RuntimeError where no thread can be made: then waiters go on reading
                    self._thread = thread

    def _run(self) -> None:
        # A waiter that reads now continues until its next packet, and then leaves the socket to this thread.
        self._reading.acquire()
        while True:
            self._dispatch(self._link.receive(self._socket, self._buffer))


class Grants:
    """Memory of the arena for packets on the side socket: one ALLOCATE for each range."""

    def __init__(self, link: Link, side: Reader) -> None:
        self._link = link
        self._side = side
        self._asked: dict[int, Grant] = {}

    def take(self, size: int) -> int:
        """The offset of `size` bytes.

        Raises:
            TritonModelException: the server has no memory for them.
        """
        grant = Grant()
        number = self._link.next_id()
        self._asked[number] = grant
        self._link.send(self._link.side, p.ALLOCATE, number=number, offset=size)
        self._side.wait(grant)
        if grant.code:
            raise TritonModelException(no_memory(size))
        return grant.offset

    def arrived(self, packet: Packet) -> None:
        """An ALLOCATED on the side socket."""
        grant = self._asked.pop(packet.id)
        grant.offset = packet.offset
        grant.code = packet.code
        grant.finish()


class Grant(Waiter):
    """A requested range of the arena."""

    __slots__ = ("code", "offset")

    offset: int
    code: int


def _nothing(_: int) -> None:
    """Do nothing: the default of `on_forget`, for a worker that maps no regions."""


def no_memory(size: int) -> str:
    """The error when the server grants no memory."""
    return f"no shared memory for {size} bytes: the limit of the model is reached"
