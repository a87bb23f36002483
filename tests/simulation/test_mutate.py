"""Guards the planted faults: each can still be planted where it was meant to be."""

from pathlib import Path

import pytest

from tests.simulation.mutate import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_faults_have_their_place(fault: Fault):
    """A change of the source that takes the place of a fault away says where the fault is now."""
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
