"""Fixtures of the native tests."""

from tests.counters import native_counters

__all__ = ["native_counters"]
