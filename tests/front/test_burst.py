"""Very many requests at once: thousands of calls over a few connections, thousands of requests on one stream."""

from __future__ import annotations

import threading

import grpc
import pytest

from bench import messages
from bench.repository import GATHER, Identity, write
from inferd_client.driver import Driver, Fixed
from tests.conformance import doors
from tests.conformance.client import Stub, floats, output, request


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models"), [Identity("identity", (("FP32", 1),), parameters=GATHER)])


def test_8000_calls_over_16_connections_are_all_answered(repository):
    """A connection has 256 streams; its other calls wait in the client. None is refused, reset or cancelled."""
    exchanges = [messages.identity(4 * size) for size in (16, 17, 18, 19)]
    workload = Fixed([each.request for each in exchanges], [each.response for each in exchanges])
    with doors.running_server("native", repository, "--max-queued-requests-per-model=8000") as process:
        for _ in range(3):
            with Driver(process.address, connections=16) as driver:
                report = driver.run(workload, in_flight=500, requests=8000)
            assert (report.requests, report.correct) == (8000, 8000), report.samples
            assert (report.cancelled, report.reset, report.lost) == (0, 0, 0)


@pytest.mark.parametrize("door", doors.NAMES)
def test_5000_requests_are_written_to_a_stream_before_any_answer_is_read(repository, door):
    """The server reads 128 ahead of its answers; what is written beyond waits under flow control, nothing is lost."""
    written = threading.Event()

    def requests():
        for number in range(5000):
            yield request("identity", floats(number), id=str(number))
        written.set()

    with doors.running_server(door, repository) as process, grpc.insecure_channel(process.address) as channel:
        responses = Stub(channel).ModelStreamInfer(requests(), timeout=60)
        assert written.wait(60)
        answers = [response.infer_response for response in responses]
        assert [answer.id for answer in answers] == [str(number) for number in range(5000)]
        assert [output(answer).item() for answer in answers] == list(range(5000))
