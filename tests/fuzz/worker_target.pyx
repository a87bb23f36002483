# Invariant: whatever a worker of a Python model sends, and whatever clients ask and give up meanwhile, the server does
# not crash, reads and writes nothing that is not its own (the address and undefined-behaviour sanitizers watch),
# answers every request once, lends no memory for ever, and starts the next worker. See `player`, which plays the
# scripts.
"""The fuzz target of the server's side of the wire to workers: run(argv) hands the process over to libFuzzer."""

import tempfile
from pathlib import Path

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

include "driver.pxi"

from tests.fuzz.player import Stage

cdef object stage


cdef int one(const uint8_t *data, size_t size) noexcept:
    """One script."""
    try:
        stage.play(data[:size])
    except BaseException:
        fail()
    return 0


def run(argv):
    """Fuzz with libFuzzer's arguments; ends the process."""
    global stage
    with tempfile.TemporaryDirectory() as root:
        stage = Stage(Path(root))
        drive(argv, one)
