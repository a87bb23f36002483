"""A stub of the CUDA driver, for tests without a GPU: builds it and controls it. `cuda_stub.h` says what it checks.

    stub = gpu_stub.load()          # builds it once, and loads it into `inferd._native.cuda`
    stub.hold("d2d") ... stub.release("d2d")
    stub.check()                    # no violation, nothing left alive

A server in another process uses the stub with `--cuda-driver <library()>`. It reads the stub's settings from the
variable CUDA_STUB, and writes the report to the file that CUDA_STUB_REPORT names.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
BUILT = Path(__file__).resolve().parents[2] / "build" / "gpu_stub"
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fPIC", "-shared")
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
IGNORED = -1  # see cuda_stub.h
PATIENCE = 60.0  # seconds that a test waits for an event


@functools.cache
def library() -> Path:
    """The shared object, compiled if it does not exist. The variable CFLAGS can add flags, such as a sanitizer's."""
    flags = [*FLAGS, *os.environ.get("CFLAGS", "").split()]
    content = b"".join(source.read_bytes() for source in SOURCES)
    digest = hashlib.sha256(content + " ".join(flags).encode()).hexdigest()[:16]
    path = BUILT / f"libcuda_stub-{digest}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        sources = [str(source) for source in SOURCES if source.suffix == ".c"]
        command = [*os.environ.get("CC", "cc").split(), *flags, "-o", str(unfinished), *sources, "-lpthread"]
        subprocess.run(command, check=True)
        unfinished.rename(path)
    return path


class Stub:
    """The stub driver of this process."""

    def __init__(self) -> None:
        lib = ctypes.CDLL(str(library()))
        lib.stub_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
        lib.stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_int]
        lib.stub_break.argtypes = [ctypes.c_int, ctypes.c_int]
        lib.stub_hold.argtypes = [ctypes.c_char_p, ctypes.c_int]
        lib.stub_executed.argtypes = lib.stub_calls.argtypes = [ctypes.c_char_p]
        lib.stub_executed.restype = lib.stub_calls.restype = ctypes.c_uint64
        lib.stub_await.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double]
        lib.stub_bytes.argtypes = [ctypes.c_ulonglong, ctypes.c_size_t]
        lib.stub_bytes.restype = ctypes.c_void_p
        lib.stub_wrote.argtypes = [ctypes.c_ulonglong, ctypes.c_size_t]
        lib.stub_loop.argtypes = lib.stub_step.argtypes = [ctypes.c_int]
        lib.stub_kernel.argtypes = [
            ctypes.c_void_p,
            KERNEL,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_uint64 * 3),
            ctypes.c_int,
        ]
        lib.stub_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        lib.stub_report.restype = ctypes.c_size_t
        self.lib = lib
        self._run = KERNEL(self._run_kernel)
        self._kernels: dict[int, Callable[[], None]] = {}
        self._problems: list[str] = []

    def set(self, **settings: int) -> None:
        """Settings as in CUDA_STUB: devices, nodes, memory, full, copy_us, d2d_us, threads, reopens."""
        for name, value in settings.items():
            self.lib.stub_set(name.encode(), value)

    def fail(self, function: str, code: int, after: int = 0, *, here: bool = False) -> None:
        """Have one call of a driver function return `code`. `after`: the number of calls before it.

        With `here` only calls of this thread count.
        """
        self.lib.stub_fail(function.encode(), after, code, here)

    def forgive(self) -> None:
        """Forget the errors that no call has returned."""
        self.lib.stub_forgive()

    def forgive_one(self, function: str) -> bool:
        """Forget the error that a function was to return; false: it has, or was to return none."""
        return bool(self.lib.stub_forgive_one(function.encode()))

    def ignore(self, function: str, after: int = 0) -> None:
        """Have one call of a driver function do nothing. So a test shows that the stub finds a missing call."""
        self.fail(function, IGNORED, after)

    @contextlib.contextmanager
    def broken(self, code: int, device: int = 0) -> Iterator[None]:
        """Have every call fail with a sticky error until the context ends."""
        self.lib.stub_break(device, code)
        try:
            yield
        finally:
            self.lib.stub_break(device, 0)

    def hold(self, kind: str) -> None:
        """Operations of this kind (h2d, d2h, d2d, fill, kernel) do not run until `release`."""
        self.lib.stub_hold(kind.encode(), 1)

    def release(self, kind: str) -> None:
        self.lib.stub_hold(kind.encode(), 0)

    @contextlib.contextmanager
    def held(self, kind: str) -> Iterator[None]:
        self.hold(kind)
        try:
            yield
        finally:
            self.release(kind)

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Until the context ends, this thread must not wait for a device, nor leave a CUDA context current."""
        self.lib.stub_loop(1)
        try:
            yield
        finally:
            self.lib.stub_loop(0)

    def executed(self, kind: str) -> int:
        """How many operations of this kind have run."""
        return int(self.lib.stub_executed(kind.encode()))

    def wait_executed(self, kind: str, count: int) -> None:
        """Until `count` operations of this kind have run since the process began."""
        assert self.lib.stub_await(kind.encode(), count, PATIENCE), f"{self.executed(kind)} of {count} {kind} ran"

    def ready(self) -> int:
        """The number of streams with an operation to execute, where they have no threads (`threads` is 0)."""
        return int(self.lib.stub_ready())

    def step(self, which: int) -> None:
        """Execute the next operation of one of these streams."""
        self.lib.stub_step(which)

    def run_all(self, *, runs: bool) -> None:
        """Where streams have no threads, this thread runs itself what it waits for, or no more."""
        self.lib.stub_run_all(int(runs))

    def forget_kernels(self) -> None:
        """No kernel is in a stream or a graph any more."""
        self._kernels.clear()

    def streams(self, priority: int) -> int:
        """How many streams there are of this priority: 0 is the least, -5 the greatest."""
        return int(self.lib.stub_streams(priority))

    def calls(self, function: str) -> int:
        """How often a function of the driver was called."""
        return int(self.lib.stub_calls(function.encode()))

    def current_context(self) -> int | None:
        """The current CUDA context of this thread."""
        context = ctypes.c_void_p()
        assert self.lib.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    def launch(self, stream: int, function: Callable[[], None], touched: Sequence[tuple[int, int, bool]]) -> int:
        """Add a kernel to the stream, which calls `function`. Returns the driver's error.

        Args:
            stream: its handle.
            touched: address, size and whether they are written, of all bytes of the device that it touches.
        """
        number = len(self._kernels) + 1
        self._kernels[number] = function  # never removed: it may be part of a graph
        arguments = (ctypes.c_uint64 * 3 * len(touched))(*touched)
        return int(self.lib.stub_kernel(stream, self._run, number, arguments, len(touched)))

    def _run_kernel(self, number: int) -> None:
        try:
            self._kernels[number]()
        except Exception as error:  # on a thread of the stub: no caller would see the exception
            self._problems.append(f"violation: a kernel failed: {type(error).__name__}: {error}")

    def array(self, address: int, size: int) -> memoryview:
        """Device memory to compute in, in place."""
        return memoryview((ctypes.c_uint8 * size).from_address(self._bytes(address, size))).cast("B")

    def read(self, address: int, size: int) -> bytes:
        """The present content of device memory, also while an operation writes to it."""
        return ctypes.string_at(self._bytes(address, size), size)

    def write(self, address: int, data: bytes) -> None:
        """Change device memory, as a fake kernel does."""
        ctypes.memmove(self._bytes(address, len(data)), data, len(data))
        self.lib.stub_wrote(address, len(data))

    def _bytes(self, address: int, size: int) -> int:
        found = self.lib.stub_bytes(address, size)
        assert found, f"{size} bytes at {address:#x} are beyond an allocation"
        return int(found)

    def report(self) -> list[str]:
        """Return the violations since the last report, and which objects of the driver are alive now."""
        text = ctypes.create_string_buffer(1 << 16)
        self.lib.stub_report(text, len(text))
        problems, self._problems = self._problems, []
        return [*problems, *text.value.decode().splitlines()]

    def leftovers(self) -> list[str]:
        """The report without the contexts of devices, which live as long as a `Device` does."""
        return [line for line in self.report() if "the context of device" not in line]

    def violations(self) -> list[str]:
        """The violations since the last report."""
        return [line for line in self.report() if line.startswith("violation")]


@functools.cache
def load() -> Stub:
    """The stub, loaded into `inferd._native.cuda.driver` as the driver of this process."""
    from inferd._native.cuda import driver

    stub = Stub()
    driver.load(str(library()))
    return stub
