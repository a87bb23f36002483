"""Fixtures of the tests of the front doors."""

from tests.conformance.fixtures import repository
from tests.counters import native_counters

__all__ = ["native_counters", "repository"]
