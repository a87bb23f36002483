"""Fixtures of the tests of TensorRT."""

from tests.counters import native_counters

__all__ = ["native_counters"]
