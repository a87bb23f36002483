"""Fixtures of the tests of what can be watched."""

from tests.counters import native_counters

__all__ = ["native_counters"]
