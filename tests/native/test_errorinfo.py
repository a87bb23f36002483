"""The encoder of rich errors against official protobuf."""

from __future__ import annotations

import base64

import pytest

from inferd._native.refusal import STOPPING, count_refusal, refusal_counts, refusal_table
from inferd._native.transport.errorinfo import rich_status
from inferd.server.errors import Status
from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.native.h2peer import Peer, framed


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_each_status_has_a_reason_and_unavailable_alone_a_time_to_retry(status):
    rich = richerrors.read(rich_status(status, "text"))
    assert (rich.code, rich.message, rich.domain) == (status, "text", "inferd")
    assert rich.reason
    assert (rich.retry_seconds is not None) == (status is Status.UNAVAILABLE)


@pytest.mark.parametrize(("refusal", "row"), list(enumerate(refusal_table(), 1)))
def test_every_refusal_is_sent_and_counted_by_its_name(refusal, row):
    name, status, retry, _ = row
    before = refusal_counts().get(name, 0)
    count_refusal(status, refusal)
    assert refusal_counts()[name] == before + 1
    rich = richerrors.read(rich_status(status, "text", refusal))
    assert (rich.code, rich.reason, rich.retry_seconds is not None) == (status, name, retry)


def test_a_status_alone_has_its_usual_reason():
    statuses = {status for _, status, _, _ in refusal_table()}
    assert {Status(status).name: richerrors.read(rich_status(status, "text")).reason for status in statuses} == {
        "INVALID_ARGUMENT": "INVALID_REQUEST",
        "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
        "NOT_FOUND": "NOT_FOUND",
        "PERMISSION_DENIED": "NOT_ALLOWED",
        "RESOURCE_EXHAUSTED": "LIMIT_EXCEEDED",
        "UNIMPLEMENTED": "NOT_SERVED",
        "INTERNAL": "INTERNAL",
        "UNAVAILABLE": "NOT_READY",
        "UNAUTHENTICATED": "UNKNOWN_CALLER",
    }


@pytest.mark.parametrize("text", ["", "x", "häßlich 🙂", "x" * 1024])
def test_any_text_is_in_the_message_unchanged(text):
    rich = richerrors.read(rich_status(14, text, STOPPING))
    assert (rich.message, rich.reason, rich.retry_seconds) == (text, "STOPPING", 0.1)


@pytest.mark.parametrize("text", ["x" * 1025, "ä" * 513])
def test_what_is_too_long_is_left_out(text):
    assert rich_status(3, text) == b""


def test_trailers_have_it_without_padding(made_lanes):
    """The sizes leave each remainder that base64 knows."""
    lanes = made_lanes()
    peer = Peer(lanes.endpoint)
    lacking = set()
    for size in range(1, 7):
        stream = peer.open()
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"1"])
        message.inputs.add(name="x" * size, datatype="UINT8", shape=[1, 1])
        peer.send(stream, framed(message.SerializeToString()), end=True)
        peer.pump()
        lanes.settle()
        peer.pump()
        answer = peer.answers[stream]
        told = answer.headers[richerrors.KEY]
        rich = richerrors.read(base64.b64decode(told + "=" * (-len(told) % 4), validate=True))
        assert (rich.code, rich.message) == (answer.status, answer.headers["grpc-message"])
        lacking.add(-len(told) % 4)
    assert lacking == {0, 1, 2}
    peer.close()
