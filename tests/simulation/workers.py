"""Simulations in processes of their own: forks of one that has imported everything and run nothing.

So each begins with the same memory whatever ran before, one that crashes is an outcome as any other, and several run at
a time.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Iterator

from tests.simulation.simulation import Outcome, Scale, simulate
from tests.simulation.world import World

PATIENCE = 120.0  # seconds of real time for one simulation: threads wait for each other outside the world


def jobs() -> int:
    """Simulations at a time: one for each processor."""
    return len(os.sched_getaffinity(0))


class Running:
    """A simulation in its process."""

    def __init__(self, seed: int, pid: int, pipe: int) -> None:
        self.seed = seed
        self.pid = pid
        self.pipe = pipe
        self.data = bytearray()
        self.until = time.monotonic() + PATIENCE

    def read(self) -> Outcome | None:
        """What came; the outcome at the end."""
        part = os.read(self.pipe, 1 << 20)
        self.data += part
        return None if part else self.end()

    def end(self) -> Outcome:
        """The outcome, at the end of the process or of the patience with it."""
        os.close(self.pipe)
        late = time.monotonic() > self.until
        if late:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if self.data and not late:
            outcome = pickle.loads(bytes(self.data))
            assert isinstance(outcome, Outcome)
            return outcome
        if late:
            return Outcome(self.seed, problem=f"it does not end in {PATIENCE:.0f} s")
        code = os.waitstatus_to_exitcode(status)
        return Outcome(self.seed, problem=f"it ends with {signal.Signals(-code).name if code < 0 else code}")


class Sandbox:
    """Forks simulations. Nothing else of the process may have threads."""

    def __init__(self) -> None:
        self.world = World()
        self.processors = sorted(os.sched_getaffinity(0))

    def start(self, seed: int, scale: Scale, keep: int = -1) -> Running:
        """Begin one; see `simulate`."""
        theirs, ours = os.pipe()
        pid = os.fork()
        if pid:
            os.close(ours)
            return Running(seed, pid, theirs)
        status = 1
        try:
            # one thread runs at a time: it need not change processors
            os.sched_setaffinity(0, {self.processors[seed % len(self.processors)]})
            outcome = simulate(self.world, seed, scale, keep)
            with os.fdopen(ours, "wb") as file:
                file.write(pickle.dumps(outcome))
            status = 0
        finally:
            os._exit(status)

    def run(self, seed: int, scale: Scale, keep: int = -1) -> Outcome:
        """One, from its beginning to its end."""
        running = self.start(seed, scale, keep)
        while select.select([running.pipe], [], [], max(0, running.until - time.monotonic()))[0]:
            outcome = running.read()
            if outcome is not None:
                return outcome
        return running.end()


def outcomes(sandbox: Sandbox, seeds: Iterator[int], scale: Scale, jobs: int) -> Iterator[Outcome]:
    """Of all of them, as they end."""
    running: dict[int, Running] = {}
    more = True
    try:
        while True:
            while more and len(running) < jobs:
                seed = next(seeds, None)
                more = seed is not None
                if seed is not None:
                    started = sandbox.start(seed, scale)
                    running[started.pipe] = started
            if not running:
                return
            for pipe in select.select(list(running), [], [], 1.0)[0]:
                outcome = running[pipe].read()
                if outcome is not None:
                    del running[pipe]
                    yield outcome
            for pipe, each in list(running.items()):
                if time.monotonic() > each.until:
                    del running[pipe]
                    yield each.end()
    finally:
        for each in running.values():
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
            os.close(each.pipe)
