"""Fixtures of the Python backend's tests."""

from tests.counters import native_counters

__all__ = ["native_counters"]
