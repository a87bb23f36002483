"""The load driver itself: what it writes must be what it was given, however large."""

from pathlib import Path

from bench import inferd, messages
from bench.driver import Driver, Fixed
from bench.repository import Identity, write


def test_bodies_that_fill_all_pieces_of_one_write(tmp_path: Path) -> None:
    """32 slices by reference fill the list of pieces exactly; the copied tails behind them must wait for the next."""
    server = inferd.start(write(tmp_path / "models", [Identity("identity", (("FP32", 1),))]), tmp_path / "log")
    try:
        exchanges = [messages.identity((256 << 10) + 4 * extra) for extra in (0, 16, 900)]
        workload = Fixed([each.request for each in exchanges], [each.response for each in exchanges])
        with Driver(server.address) as client:
            report = client.run(workload, in_flight=32, requests=96)
        assert report.correct == 96, report.samples
    finally:
        assert server.stop() == 0
