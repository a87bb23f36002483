"""Guards the log of refused requests: a line each, bounded per second, and nothing lost without a word."""

import logging

import pytest

from inferd.server.engine.housekeeping.deliveries import CUT_AT, RefusalLog
from inferd.server.errors import Status


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING, "inferd.requests")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_for_each(lines):
    RefusalLog().add([(Status.NOT_FOUND, "no such model"), (Status.INVALID_ARGUMENT, "wrong shape")], now=1.0)
    assert lines() == ["refused: NOT_FOUND: no such model", "refused: INVALID_ARGUMENT: wrong shape"]


def test_more_than_the_limit_is_counted_and_told_in_the_next_second(lines):
    refusals = RefusalLog(lines_per_second=2)
    refusals.add([(Status.NOT_FOUND, str(i)) for i in range(5)], left_out=7, now=1.0)
    assert lines() == ["refused: NOT_FOUND: 0", "refused: NOT_FOUND: 1"]
    refusals.add([(Status.NOT_FOUND, "next")], now=2.5)
    assert lines()[2:] == ["refused: 10 more requests, left out here", "refused: NOT_FOUND: next"]


def test_long_texts_are_cut(lines):
    RefusalLog().add([(Status.NOT_FOUND, "x" * 10_000)], now=1.0)
    assert len(lines()[0]) < CUT_AT + 50
