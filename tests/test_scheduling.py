"""Guards the order in which processes get files of tests, and that a test which ends its process is not run again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.scheduling import LONGEST, LongestFirst

ROOT = Path(__file__).parents[1]
TESTS = ["a.py::one", "a.py::two", "a.py::three", "a.py::four", "b.py::one", f"{LONGEST[1]}::one", f"{LONGEST[0]}::one"]


class Node:
    """A process that runs tests, as a scheduler sees it."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(count: int) -> tuple[LongestFirst, list[Node]]:
    options = {"tx": [f"{count}*popen"], "loadscopereorder": True}
    config = SimpleNamespace(getvalue=options.get, option=SimpleNamespace(**options))
    scheduler = LongestFirst(config)  # type: ignore[arg-type]
    nodes = [Node() for _ in range(count)]
    for node in nodes:
        scheduler.add_node(node)  # type: ignore[arg-type]
        scheduler.add_node_collection(node, TESTS)  # type: ignore[arg-type]
    scheduler.schedule()
    return scheduler, nodes


def test_the_longest_files_are_there():
    assert [file for file in LONGEST if not (ROOT / file).exists()] == []


def test_the_longest_files_come_first_and_then_those_of_many_tests():
    _, [first, second] = scheduled(2)
    assert first.given[0] == f"{LONGEST[0]}::one"
    assert second.given[0] == f"{LONGEST[1]}::one"
    assert first.given[1:] + second.given[1:] == [*TESTS[:5]]


def test_the_test_that_has_ended_its_process_is_not_given_to_another():
    scheduler, [first, second] = scheduled(2)
    assert first.given == [TESTS[6], *TESTS[:4]]
    scheduler.mark_test_complete(first, 6)  # type: ignore[arg-type]
    assert scheduler.remove_node(first) == TESTS[0]  # type: ignore[arg-type]
    second.shutting_down = False
    for index in (5, 4):
        scheduler.mark_test_complete(second, index)  # type: ignore[arg-type]
    assert second.given[2:] == TESTS[1:4]
