"""The ledger of native objects, as a fixture: what a test makes is gone when it ends."""

import gc
import time

import pytest

from inferd._native.memory.resource import live_counters
from tests.waiting import PATIENCE, PAUSE


@pytest.fixture
def native_counters():
    """Fails a test that leaves a native object alive.

    Threads let go of objects after they have answered, so a test that is over waits for them. What an earlier test of
    this process left to a thread may end during this one.
    """
    before = settled_counters()
    yield before
    end = time.monotonic() + PATIENCE
    while left := {name: count for name, count in settled_counters().items() if count > before[name]}:
        assert time.monotonic() < end, left
        time.sleep(PAUSE)


def settled_counters() -> dict[str, int]:
    """The counters, after the collector has had its chance; it is slow where frameworks are loaded.

    A second one, because what coroutines of a closed loop hold is freed only after these have been finalized.
    """
    for _ in range(2):
        if any(live_counters().values()):
            gc.collect()
    return live_counters()
