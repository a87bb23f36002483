"""The world in which a simulation runs: who runs next, and what time it is; see `world.c`."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUILT = Path(__file__).resolve().parents[2] / "build" / "simulation"
FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
NEVER = (1 << 63) - 1
WORKER_FD = 0  # what a descriptor tells the main thread
LOOP_FDS = (1, 2, 4, 8, 16)  # the same, of those that the loop reads
UNWATCHED = -1
START_NS = 1_000_000_000_000
MS = 1_000_000


@functools.cache
def library(name: str) -> Path:
    """The shared object of this source, compiled if it is not there yet."""
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    path = BUILT / f"lib{name}-{digest}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = [*os.environ.get("CC", "cc").split(), *FLAGS, "-o", str(unfinished), str(source)]
        subprocess.run([*command, "-lpthread", "-ldl"], check=True)
        unfinished.rename(path)
    return path


class Do(IntEnum):
    """The next action of the main thread; see `world_step`."""

    REST = 0
    SEE_OFF = 1
    EVENT = 2
    WORKER = 3
    GPU = 4
    LOOP = 5
    TASKS = 6
    STAND = 7
    STOP = 8


class World:
    """Threads and time of this process. Make it once, on the main thread, when all extensions are imported."""

    def __init__(self) -> None:
        self.lib = lib = ctypes.CDLL(str(library("world")))
        quick = ctypes.PyDLL(str(library("world")))  # what never waits need not let go of the GIL
        lib.world_begin.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        lib.world_sleep.argtypes = [ctypes.c_int64]
        lib.world_join.argtypes = [ctypes.c_char_p]
        lib.world_wait.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        quick.world_now.restype = quick.world_next.restype = ctypes.c_int64
        quick.world_story.restype = quick.world_switches.restype = quick.world_failed_takes.restype = ctypes.c_uint64
        quick.world_problem.restype = ctypes.c_char_p
        quick.world_step.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        quick.world_use_gpus.argtypes = [ctypes.c_void_p]
        quick.world_complain.argtypes = [ctypes.c_char_p]
        quick.world_idle.argtypes = [ctypes.c_char_p]
        quick.world_advance.argtypes = [ctypes.c_int64]
        quick.world_taken.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        quick.world_notify.argtypes = [ctypes.c_void_p]
        quick.world_connect.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
        quick.world_send.argtypes = quick.world_take.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
        quick.world_send.restype = quick.world_take.restype = quick.world_late.restype = ctypes.c_int64
        quick.world_waiting.restype = quick.world_full_ns.restype = quick.world_silence.restype = ctypes.c_int64
        quick.world_done.restype = ctypes.c_uint64
        quick.world_untaken.restype = ctypes.c_size_t
        self.run = lib.world_run
        self.sleep = lib.world_sleep
        self.wait = lib.world_wait
        self.leave = lib.world_leave
        self.stay_out = quick.world_stay_out
        self.now = quick.world_now
        self.next = quick.world_next
        self.runnable = quick.world_runnable
        self.advance = quick.world_advance
        self.step = quick.world_step
        self.watch = quick.world_watch
        self.notify = quick.world_notify
        self.has_tasks = quick.world_has_tasks
        self.alive = quick.world_alive
        self.worker = quick.world_worker
        self.loop_ready = quick.world_loop_ready
        self.set_faults = quick.world_set_faults
        self.may_fail = quick.world_may_fail
        self.fail_at = quick.world_fail_at
        self.io_ran = quick.world_io_ran
        self.late = quick.world_late
        self.copying = quick.world_copying
        self.one_at_a_time = quick.world_one_at_a_time
        self.front_is_held = quick.world_front_is_held
        self.quick = quick
        assert lib.world_hook() > 0, "no extension module imports anything"

    def begin(self, seed: int, *, preempt: int = 0, spurious: int = 0) -> None:
        """Begin anew.

        Args:
            seed: of what the world draws.
            preempt: of a thousand times that a mutex is about to be taken, how often another thread runs first.
            spurious: of a thousand advances of the clock, how many end one thread's wait without a reason.
        """
        left = self.lib.world_begin(seed, START_NS, preempt, spurious, 0)
        assert left == 0, f"{left} threads of the last simulation are left"

    def join(self, name: str) -> None:
        """Have this thread be one of the world; it goes on when it has its turn."""
        self.lib.world_join(name.encode())

    def admit(self, count: int) -> None:
        """Let in so many threads that were started."""
        assert self.lib.world_admit(count), f"{count} threads were to join"

    def use_gpus(self, ready: Any) -> None:
        """Have streams of devices go on, of which this function of a library says how many could."""
        self.quick.world_use_gpus(ctypes.cast(ready, ctypes.c_void_p))

    def complain(self, text: str) -> None:
        """A rule is broken."""
        self.quick.world_complain(text.encode())

    def idle(self, version: str) -> int:
        """Threads of the instances of this version, by its prefix, that wait for work."""
        return int(self.quick.world_idle(f"{version}_".encode()))  # without the _, version 1 would have those of 10

    @property
    def story(self) -> int:
        """A number that tells runs apart."""
        return int(self.quick.world_story())

    @property
    def switches(self) -> int:
        return int(self.quick.world_switches())

    @property
    def failed_takes(self) -> int:
        """Requests for memory that were refused."""
        return int(self.quick.world_failed_takes())

    @property
    def taken(self) -> str:
        """The memory that the server has and did not have when the world began; empty: none."""
        text = ctypes.create_string_buffer(2000)
        count = self.quick.world_taken(text, len(text))
        return f"{count} blocks of memory: {text.value.decode()}" if count else ""

    @property
    def problem(self) -> str:
        """What a thread did against the rules; empty: nothing."""
        return str(self.quick.world_problem().decode())


class WorldThread:
    """A thread of the world, which another one waits for within it.

    Args:
        world: where.
        target, name: as for `threading.Thread`.
    """

    def __init__(self, world: World, target: Callable[[], None], name: str) -> None:
        self._world = world
        self._target: Callable[[], None] | None = target
        self._name = name
        self._gone = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self._world.join(self._name)
        try:
            assert self._target is not None
            self._target()
        finally:
            self._target = None  # what goes with it goes within the world
            self._gone = True
            self._world.leave()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        while not self._gone:
            self._world.sleep(MS)
