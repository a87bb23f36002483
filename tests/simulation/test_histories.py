"""Guards the single structures whose histories simulations compare with models in Python."""

import pytest

from tests.simulation.histories import make_histories


@pytest.mark.parametrize("part", range(4))
def test_structures_do_what_their_models_do(part):
    for number in range(60):
        make_histories(1000 * part + number)
