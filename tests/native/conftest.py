"""Fixtures of the native tests."""

from tests.counters import native_counters
from tests.gpu_stub.fixtures import stub

__all__ = ["native_counters", "stub"]
