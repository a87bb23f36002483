"""Fixtures of the native tests."""

import pytest

from tests.counters import native_counters
from tests.gpu_stub.fixtures import stub

__all__ = ["made_lanes", "native_counters", "stub"]


@pytest.fixture
def made_lanes():
    """Makes lanes with the limits that it is given, on a clock that the test moves; they are closed at the end."""
    from tests.native.h2peer import Clock, Lanes  # not for tests that need no HTTP/2

    all_lanes = []

    def make(**limits):
        lanes = Lanes(**limits)
        lanes.endpoint.clock = Clock()
        all_lanes.append(lanes)
        return lanes

    yield make
    for lanes in all_lanes:
        lanes.close()
