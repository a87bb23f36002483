"""A short storm of loading on demand; see `tests.storms.demand`."""

from __future__ import annotations

from tests.storms.demand import Plan, storm


def test_a_storm_on_shared_steps() -> None:
    """Every request is answered right or gets its own deadline; memory stays within the budget; all accounts agree."""
    outcome = storm(Plan(seconds=2.0, steps=8, ensembles=12, share=0.5, clients=12))
    assert not outcome.faults
    assert outcome.statuses["OK"] > 20
    assert outcome.unloads and outcome.looks
