"""A plugin for pytest: which marks does each test reach, and how long does it take? `-p tests.mutants.noting`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.mutants.marks import FOLDER, take

NOTES = "MUTANTS_NOTES"  # the file for a line of JSON of each test
seconds: dict[str, float] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What imports reach belongs to no test."""
    take(Path(os.environ[FOLDER]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of setting up, of the call and of tearing down."""
    seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test is over."""
    note(Path(os.environ[NOTES]), nodeid, seconds.pop(nodeid, 0.0))


def note(path: Path, run: str, took: float) -> None:
    """Add what was reached since the last note."""
    reached = {module: bits(data) for module, data in take(Path(os.environ[FOLDER])).items()}
    with path.open("a") as file:
        file.write(json.dumps({"run": run, "seconds": round(took, 2), "reached": reached}) + "\n")


def bits(data: bytes) -> str:
    """A bit for each byte that is set, the first one lowest, as a hexadecimal number."""
    return f"{int(''.join('1' if byte else '0' for byte in reversed(data)), 2):x}"
