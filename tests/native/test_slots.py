"""Guards sequence batching against a plain model of its documented rules, and the promises that clients rely on."""

from __future__ import annotations

from random import Random

import pytest

from tests.native.slots_model import play

pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.mark.parametrize("part", range(4))
def test_policy_is_the_documented_one(part):
    """Same answers, batches and counts at every step of random histories; nothing is lost or answered twice."""
    for number in range(120):
        random = Random(f"{part} {number}")
        play(random, random.randint(1, 60))
