"""Fixtures of the tests of the front doors."""

from tests.conformance.fixtures import repository

__all__ = ["repository"]
