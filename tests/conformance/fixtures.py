"""Fixtures for the tests of other folders, too."""

import pytest

from tests.conformance import models


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """The models of `tests.conformance.models`, which a test leaves as they are."""
    root = tmp_path_factory.mktemp("models")
    models.write_repository(root)
    return root
