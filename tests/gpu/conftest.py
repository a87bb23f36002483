"""Tests that need a real GPU: `python -m pytest tests/gpu -rs`. Without one, each is skipped and says so.

With INFERD_GPU_REPORT=<file> what was found goes there as JSON: the GPU, the driver, and each test's outcome.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from inferd._native.cuda import driver
from inferd._native.cuda.device import device
from tests.engine.region_owner import RegionOwner

REPORT = "INFERD_GPU_REPORT"
WHOLE = 2 << 20  # the driver may cut smaller memory out of a block, which is then what a handle stands for

_outcomes: dict[str, str] = {}


def _missing() -> str:
    """Why there is no GPU; empty when there is one."""
    if driver.is_loaded():
        return "another driver was loaded before"
    try:
        driver.load()
    except driver.CudaUnavailable as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def gpu():
    """The first device."""
    missing = _missing()
    if missing:
        pytest.skip(f"needs a GPU: {missing}")
    found = device(0)
    found.use()
    return found


@pytest.fixture
def owner(gpu):
    """Another process with `WHOLE` bytes on it."""
    owner = RegionOwner(library=driver.DEFAULT_LIBRARY, size=WHOLE)
    yield owner
    owner.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_logreport(report):
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish():
    path = os.environ.get(REPORT)
    if not path or not _outcomes:
        return
    found = {"gpu": None, "outcomes": _outcomes}
    if driver.is_loaded():
        first = device(0)
        found["gpu"] = {"name": first.name, "capability": first.compute_capability, "driver": driver.version()}
    Path(path).write_text(json.dumps(found, indent=1))
