"""Guards the whole native server as its parts meet: clients of every temper, models of every sort that come and go,
memory that runs out, in virtual time, as fixed seeds say, and one that nobody knows before.

A seed that fails is told with its story; `make simulate SEED=n` runs it again. Longer: `make simulate SEEDS=1000`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERY_TAKE = os.environ.get("INFERD_EVERY_TAKE", "17")


def run(*arguments: str) -> str:
    """What the simulator says, in a process of its own: its forks must not have other tests' threads."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    return done.stdout


def test_every_rule_is_kept():
    """Fixed seeds, and a random one."""
    print(run("--seeds", "2", "--random"))


def test_a_seed_says_everything_that_happens():
    """Neither what the process has done before, nor whether the story is kept, makes a difference."""
    print(run("--seeds", "1", "--twice"))


def test_a_crowd_beside_them_finds_every_rule_kept():
    """Clients in C, which ask the same models much, find nothing, and the same happens again."""
    said = run("--first", "2", "--seeds", "1", "--crowd", "1000", "--twice")
    assert "of crowds 1000," in said, said


def test_another_process_tells_the_same_story():
    """A story must not depend on where a process has its memory: a seed that fails is replayed in another process."""
    alone = ("--seed", "100", "--scale", '{"models": ["plain"]}')
    assert run(*alone) == run(*alone)


QUIET = {"clients": 2, "calls": 40, "models": ["plain", "quick"], "fixed": {"traces": 0}, "operator": False}
FEW = {"clients": 1, "calls": 3, "operator": False, "cancels": False, "deadlines": False}
CALLS = dict.fromkeys(("operator", "cancels", "streams", "regions", "hostile", "jumps", "questions"), False)
STREAMS = {"models": ["plain"], "clients": 1, "calls": 4, "regions": False, "operator": False, "cancels": False}
REFUSED = {"models": ["levels"], "clients": 2, "calls": 20, **CALLS}
ENDS = {"models": ["mourned", "slow"], "clients": 2, "calls": 14, "deadlines": False, "traces": False, **CALLS}


@pytest.mark.parametrize(
    ("seed", "scale"),
    [
        (4, REFUSED),  # in which the queue is full for some
        (1, {"models": ["both"], **FEW}),
        (1, {"models": ["direct"], **FEW}),
        (1, {"models": ["plain", "inplace", "chain"], **FEW}),
        # what says that there was no memory is refused memory, too
        (4, {**STREAMS, "deadlines": False, "hostile": False, "jumps": False, "fails": 2}),
        # a sequence has become idle while all requests that there are, are under way, and its model has to be told
        (6, ENDS),
    ],
    ids=["levels", "both", "direct", "chain", "two in a row", "ends"],
)
def test_whatever_memory_is_refused_a_call_has_one_outcome(seed, scale):
    """Each seventeenth take of memory of some calls is refused (`make soak`: each): no call is forgotten, nothing stays
    behind."""
    print(run("--takes", EVERY_TAKE, "--first", str(seed), "--scale", json.dumps(scale)))


# else the client may lose the connection on which it waits, or its call has to arrive in a time; and the last that it
# asks may be a stream, which is several calls
KEPT = {"receive timeout": 0, "drops": 0, "keepalive": 0, "ages": 0}
POLITE = {"models": ["plain"], "tempers": ["polite"], "clients": 2, "calls": 12, "fixed": KEPT}
POLITE |= {"streams": False, "questions": False}
FORGETFUL = {"forgetful": True, **POLITE}


def test_what_is_broken_is_found_and_shrunk():
    """An oracle that finds nothing would let everything pass: here the end of a call is never sent."""
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "1", "--scale", json.dumps(FORGETFUL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1
    assert "The story of seed 0, shrunk to 1 calls" in done.stdout
    assert "again: python -m tests.simulation --seed 0 --scale" in done.stdout


def test_a_crash_leaves_its_story():
    """A process that ends by a signal cannot tell what happened: what it has told before is there, and is shrunk."""
    scale = {"crashes": True, "models": ["plain"], "clients": 2, "calls": 12}
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "1", "--trials", "12", "--scale", json.dumps(scale)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1
    assert "seed 0: it ends with SIGSEGV" in done.stdout
    story = done.stdout.partition("The story of seed 0")[2]
    assert "client 0       connects" in story
    assert "Fatal Python error: Segmentation fault" in story
    assert "_do_something" in story


def test_what_is_left_out_changes_nothing_else():
    """What one client asks is the same without another one's calls and without a model, so that a failure stays."""

    def asked(scale):
        lines = run("--seed", "3", "--scale", json.dumps({**QUIET, **scale})).splitlines()
        return {line.partition("client 0 ")[2].strip() for line in lines if "client 0       calls" in line}

    whole = asked({})
    assert len(whole) > 5
    assert asked({"left_out": [[1, 1, 100]]}) == whole
    without = asked({"removed": ["quick"]})
    assert without == {call for call in whole if not call.startswith("calls quick")} != whole
