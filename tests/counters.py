"""The ledger of native objects, as a fixture: what a test makes is gone when it ends."""

import gc

import pytest

from _native.memory import live_counters


@pytest.fixture
def native_counters():
    """Fails a test that leaves a native object alive."""
    gc.collect()
    before = live_counters()
    yield before
    gc.collect()
    assert live_counters() == before
