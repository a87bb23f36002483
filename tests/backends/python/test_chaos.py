"""A few seconds of `python -m tests.storms.chaos`: workers and the server are killed under load."""

from tests.storms.chaos import run


def test_no_answer_and_no_process_is_lost():
    assert run(seconds=6.0, seed=7) == []
