"""Guards that the record of growth names a goal for each curve, and tests that there are."""

from pathlib import Path

from bench.curves import Curve, Point
from bench.growth import CURVES, summary
from bench.growth_goals import GOALS

ROOT = Path(__file__).parents[2]


def test_each_curve_has_a_goal() -> None:
    assert list(GOALS) == list(CURVES)


def test_the_tests_that_guard_them_are_there() -> None:
    for test in (test for goal in GOALS.values() for test in goal.tests):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file(), test


def test_a_summary_shows_the_ends_of_a_curve() -> None:
    curve = Curve("ready", "of models", "us a call", (Point(10, 2.0), Point(1000, 2.0)))
    assert summary({"ready": curve})[2].split(" | ")[2:5] == ["2 us at 10", "2 us at 1,000", "+0.00"]
