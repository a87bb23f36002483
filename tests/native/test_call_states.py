"""Guards the states of a call: a move that is in no table ends the process in builds with assertions."""

import subprocess
import sys
from signal import SIGABRT

import pytest

from tests.native import probe

HEADERS, PREFIX, MESSAGE, ALL = range(4)
RECEIVING = {(HEADERS, PREFIX), (PREFIX, MESSAGE), (MESSAGE, PREFIX), (PREFIX, ALL), (MESSAGE, ALL)}
NONE, OPEN, READY, LAST, CUT = range(5)
RESPONSE = {(NONE, OPEN), (NONE, READY), (OPEN, LAST), (READY, LAST)} | {
    (each, CUT) for each in (NONE, OPEN, READY, LAST)
}


def test_moves_in_the_tables():
    assert [probe.move_receiving(*move) for move in sorted(RECEIVING)] == [after for _, after in sorted(RECEIVING)]
    assert [probe.move_response(*move) for move in sorted(RESPONSE)] == [after for _, after in sorted(RESPONSE)]


@pytest.mark.parametrize(
    ("move", "before", "after", "said"),
    [
        ("move_receiving", HEADERS, ALL, "receiving a call goes from state 0 to 3"),
        ("move_receiving", ALL, MESSAGE, "receiving a call goes from state 3 to 2"),
        ("move_response", LAST, OPEN, "the response of a call goes from state 3 to 1"),
        ("move_response", NONE, LAST, "the response of a call goes from state 0 to 3"),
        ("move_response", CUT, CUT, "the response of a call goes from state 4 to 4"),
    ],
)
def test_other_moves(move: str, before: int, after: int, said: str):
    """A release build makes them: it compares nothing."""
    code = f"from tests.native import probe; probe.{move}({before}, {after})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (-SIGABRT if probe.CHECKED else 0)
    assert (said in done.stderr) == probe.CHECKED
