"""A short soak of the real server through each door; `make soak` is the long one."""

from pathlib import Path

import pytest

from tests.storms.soak import Plan, soak


@pytest.mark.parametrize("door", ["native", "grpcio"])
def test_every_answer_is_its_own(door: str, tmp_path: Path) -> None:
    plan = Plan(requests=4000, connections=4, in_flight=8)
    outcome = soak(door, plan, tmp_path)
    assert outcome.faults(plan) == [], outcome.report.samples
    assert outcome.report.cancelled > 100
    assert outcome.report.deadlines > 200
