"""The demo's ensembles, from pictures and sentences to names: made, served and asked by the programs of the example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import doors

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(program, *arguments):
    command = [sys.executable, str(EXAMPLES / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    run("digits/make_repository.py", folder)
    run("ensembles/make_repository.py", folder)
    return folder


def test_pictures_and_sentences_are_recognised(repository):
    with doors.running_server("native", repository) as process:
        shown = run("ensembles/client.py", "-u", process.address, "--count", 20)
    rights = [int(right) for right in re.findall(r"^(\d+) of 20 right$", shown, re.MULTILINE)]
    assert len(rights) == 2
    assert rights[0] >= 18, shown
    assert rights[1] >= 12, shown


def test_what_is_up_to_date_is_kept(repository):
    assert run("ensembles/make_repository.py", repository) == "ensembles: up to date\n"
