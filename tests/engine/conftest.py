"""Fixtures of the engine's tests."""

from tests.counters import native_counters

__all__ = ["native_counters"]
