"""A full queue makes room by client: the client that has most of it is refused first, and others do not notice."""

from __future__ import annotations

import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors, raw
from tests.conformance.client import request
from tests.conformance.held import add_held_model
from tests.conformance.test_held_bytes import INFER, STREAM
from tests.framing import framed

PATIENCE = 60
MOST = 32


@pytest.fixture
def server(tmp_path):
    """(address, the file)"""
    go = add_held_model(tmp_path)
    with doors.running_server("native", tmp_path, f"--max-queued-requests-per-model={MOST}") as process:
        yield process.address, go


def begin(client, path, count):
    """So many calls, which the server has taken in; their streams."""
    message = framed(request("held", np.zeros(1, np.float32)).SerializeToString())
    streams = [client.headers(path) for _ in range(count)]
    for stream in streams:
        client.data(stream, message, end=True)
    before = client.pings
    client.h2.ping(b"in order")
    client.flush()
    client.receive_until(lambda: client.pings > before, PATIENCE)
    return streams


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_client_with_many_requests_keeps_nobody_from_the_model(server, path):
    """The requests of one client fill the queue; those of another client push some of them out, and are served."""
    address, go = server
    with raw.Client(address) as many, raw.Client(address, source="127.0.0.2") as other:
        first = begin(many, INFER, 4 * MOST)
        asked = begin(other, path, MOST // 4)
        many.receive_until(lambda: sum(many.answers[stream].ended for stream in first) > 3 * MOST, PATIENCE)
        more = begin(many, INFER, MOST)
        go.touch()
        for answer in [other.answer(stream, PATIENCE) for stream in asked]:
            assert answer.status == 0
            [found] = answer.messages
            assert path == INFER or not pb.ModelStreamInferResponse.FromString(found).error_message
        answers = [many.answer(stream, PATIENCE) for stream in (*first, *more)]
        refused = [answer for answer in answers if answer.status]
        assert {answer.status for answer in refused} == {14}
        assert all(answer.details.startswith("Exceeds maximum queue size: ") for answer in refused)
        assert any("this client has the most" in answer.details for answer in refused)
        assert len(answers) - len(refused) > MOST // 2, "it is served, too"
