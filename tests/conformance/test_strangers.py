"""Clients that mean another protocol, or gRPC almost: each gets an answer that it can read; the log says so once."""

from __future__ import annotations

import http.client
import json
import re
import resource
import socket
from pathlib import Path

import grpc
import pytest

from inferd.server.front.connection_log import INTERVAL, REASONS, ConnectionLog
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request

BODY = b"x" * (4 << 20)


@pytest.fixture(scope="module")
def process(repository):
    with doors.running_server("native", repository) as started:
        yield started


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("POST", BODY)])
def test_http1_gets_an_answer_in_http1(process, method, body):
    client = http.client.HTTPConnection(process.address, timeout=10)
    client.request(method, "/v2/health/live", body)
    answer = client.getresponse()
    assert answer.status == 505
    assert "gRPC" in json.loads(answer.read())["error"]  # where tritonclient.http looks for the text
    client.close()


def test_the_log_says_it_once(process):
    for _ in range(3):
        client = http.client.HTTPConnection(process.address, timeout=10)
        client.request("GET", "/")
        client.getresponse().read()
        client.close()
    process.says("HTTP/1")
    lines = [line for line in process.lines if "HTTP/1" in line]
    assert len(lines) == 1
    assert re.search(r"^W.*refused, from ipv4:127\.0\.0\.1:\d+: it speaks HTTP/1", lines[0])


@pytest.mark.parametrize("value", ["x ", " x"])
def test_a_value_with_spaces_around_it_harms_no_call(process, value):
    with grpc.insecure_channel(process.address) as channel:
        stub = Stub(channel)
        metadata = (("x-key", value),)
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=10, metadata=metadata).live
        assert stub.ModelInfer(request("simple", floats(1)), timeout=10, metadata=metadata).outputs


def test_one_line_a_minute_for_each_reason(caplog):
    moment = 0.0
    log = ConnectionLog(lambda: moment)
    for _ in range(5):
        log.add("a", "one")
    log.add("b", "another")
    moment = INTERVAL
    log.add("c", "one")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "refused, from a: one",
        "refused, from b: another",
        "refused, from c: one (4 more like it since the last line)",
    ]


def test_the_reasons_are_bounded(caplog):
    log = ConnectionLog(lambda: 0.0)
    for number in range(3 * REASONS):
        log.add("a", str(number))
    assert len(log._said) <= REASONS
    assert len(caplog.records) == 3 * REASONS


def test_the_last_open_files_are_told(process):
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    # room for the next connection behind the highest that is in use
    most = max(int(each.name) for each in Path(f"/proc/{process.pid}/fd").iterdir()) + 2
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with socket.create_connection(tuple(process.address.rsplit(":", 1))):
            process.says(f"of the server's {most} open files (ulimit -n) are for loads and workers")
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
