"""Simulations in processes of their own: forks of one that has imported everything and run nothing.

So each begins with the same memory whatever ran before, one that crashes is an outcome as any other, and several run at
a time.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import gpu_stub
from tests.simulation.audit import free_kept
from tests.simulation.hostile import cases
from tests.simulation.secure import certificates
from tests.simulation.simulation import Outcome, Scale, simulate
from tests.simulation.story import Remains, Story
from tests.simulation.world import World

PATIENCE = 60.0  # seconds in which a process must use the processor: threads wait for each other outside the world
LEAST = 0.05  # seconds of CPU in that time: less, and it waits for itself, however busy the machine is
MOST = 240.0  # seconds of CPU for one simulation
TICKS = os.sysconf("SC_CLK_TCK")


def jobs() -> int:
    """Simulations at a time: one for each processor."""
    return len(os.sched_getaffinity(0))


class Running:
    """A simulation in its process."""

    def __init__(self, seed: int, pid: int, pipe: int, remains: Remains, most: float) -> None:
        self.remains = remains
        self.most = most
        self.seed = seed
        self.pid = pid
        self.pipe = pipe
        self.data = bytearray()
        self.until = time.monotonic() + PATIENCE
        self._used = 0.0  # of CPU, when that was set

    def is_stuck(self) -> bool:
        """Whether it will not end by itself. Time alone does not tell: others may have the processors."""
        used = cpu_seconds(self.pid)
        if used > self.most:
            return True
        if time.monotonic() < self.until:
            return False
        if used - self._used < LEAST:
            return True
        self._used = used
        self.until = time.monotonic() + PATIENCE
        return False

    def read(self) -> Outcome | None:
        """Read what has come; returns the outcome at the end."""
        part = os.read(self.pipe, 1 << 20)
        self.data += part
        return None if part else self.end()

    def kill(self) -> Outcome:
        """The outcome of one that is stuck."""
        used = cpu_seconds(self.pid)
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        how = "it does not end" if used > self.most else "its threads wait for each other"
        return self._left(f"{how}: {used:.0f} s of CPU used")

    def end(self) -> Outcome:
        """The outcome, at the end of the process."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if self.data:
            outcome = pickle.loads(bytes(self.data))
            assert isinstance(outcome, Outcome)
            return outcome
        code = os.waitstatus_to_exitcode(status)
        return self._left(f"it ends with {signal.Signals(-code).name if code < 0 else code}")

    def _left(self, problem: str) -> Outcome:
        """The outcome of one that cannot tell it."""
        remains = self.remains
        return Outcome(self.seed, remains.calls, remains.models, problem=problem, log=remains.text())


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that this process has used, with its threads; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


class Sandbox:
    """Forks simulations. Nothing else of the process may have threads.

    Args:
        most: seconds of CPU that each may use.
    """

    def __init__(self, most: float = MOST) -> None:
        self._most = most
        gpu_stub.load()
        self.world = World()
        cases()  # once for all
        certificates()
        free_kept(1)  # the main thread has its lists before worlds begin
        gc.collect()
        gc.freeze()  # forks share what is there already: collections must not write to it
        self._free: list[Remains] = []
        self.processors = sorted(os.sched_getaffinity(0))

    def start(self, seed: int, scale: Scale, keep: int = -1) -> Running:
        """Begin one; see `simulate`."""
        theirs, ours = os.pipe()
        remains = self._free.pop() if self._free else Remains()
        remains.begin()
        pid = os.fork()
        if pid:
            os.close(ours)
            return Running(seed, pid, theirs, remains, self._most)
        status = 1
        try:
            Story.remains = remains
            faulthandler.enable(remains.trace)
            gc.disable()  # the simulation says when
            # one thread runs at a time: it need not change processors
            os.sched_setaffinity(0, {self.processors[seed % len(self.processors)]})
            try:
                outcome = simulate(self.world, seed, scale, keep)
            except Exception as error:  # of the server, on the thread of the loop
                traceback.print_exc()
                outcome = Outcome(seed, problem=f"it raises {error!r}")
            with os.fdopen(ours, "wb") as file:
                file.write(pickle.dumps(outcome))
            status = 0
        finally:
            os._exit(status)

    def give(self, running: Running) -> None:
        """Note that a simulation is over: others may have what it has left."""
        self._free.append(running.remains)

    def run(self, seed: int, scale: Scale, keep: int = -1) -> Outcome:
        """One, from its beginning to its end."""
        running = self.start(seed, scale, keep)
        outcome = None
        while outcome is None:
            if select.select([running.pipe], [], [], 1.0)[0]:
                outcome = running.read()
            elif running.is_stuck():
                outcome = running.kill()
        self.give(running)
        return outcome


def outcomes(sandbox: Sandbox, seeds: Iterator[int], scale_of: Callable[[int], Scale], jobs: int) -> Iterator[Outcome]:
    """The outcomes of all of them, as they end."""
    running: dict[int, Running] = {}
    more = True
    try:
        while True:
            while more and len(running) < jobs:
                seed = next(seeds, None)
                more = seed is not None
                if seed is not None:
                    started = sandbox.start(seed, scale_of(seed))
                    running[started.pipe] = started
            if not running:
                return
            for pipe in select.select(list(running), [], [], 1.0)[0]:
                outcome = running[pipe].read()
                if outcome is not None:
                    sandbox.give(running.pop(pipe))
                    yield outcome
            for pipe, each in list(running.items()):
                if each.is_stuck():
                    outcome = each.kill()
                    sandbox.give(running.pop(pipe))
                    yield outcome
    finally:
        for each in running.values():
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
            os.close(each.pipe)
