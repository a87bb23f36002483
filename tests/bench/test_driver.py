"""The load driver itself: what it writes must be what it was given, however large."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import inferd, messages
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd_client.driver import Driver, Fixed


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = inferd.start(write(tmp_path / "models", [Identity("identity", (("FP32", 1),))]), tmp_path / "log")
    yield server
    assert server.stop() == 0


def test_bodies_that_fill_all_pieces_of_one_write(server: ServerProcess) -> None:
    """32 slices by reference fill the list of pieces exactly; the copied tails behind them must wait for the next."""
    exchanges = [messages.identity((256 << 10) + 4 * extra) for extra in (0, 16, 900)]
    workload = Fixed([each.request for each in exchanges], [each.response for each in exchanges])
    with Driver(server.address) as client:
        report = client.run(workload, in_flight=32, requests=96)
    assert report.correct == 96, report.samples


def test_an_open_loop_leaves_nothing_behind_for_the_next_run(server: ServerProcess) -> None:
    """The timer of the request that would have come next must not meet a loop without a timer."""
    exchange = messages.identity(64)
    workload = Fixed([exchange.request], [exchange.response])
    with Driver(server.address) as client:
        opened = client.run(workload, rate=20.0, requests=2)
        client.idle(0.1)
        closed = client.run(workload, requests=2)
    assert (opened.correct, closed.correct) == (2, 2)
