"""What balancers and tools are told: load reports in the trailers, and where reflection answers."""

from __future__ import annotations

import base64
import time

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from inferd.server.addresses import parse_address
from inferd.server.observe.load import TRAILER
from inferd_client.pb.load_report_pb2 import OrcaLoadReport
from tests import richerrors
from tests.conformance import doors
from tests.conformance.client import floats, request
from tests.conformance.raw import Client, framed

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module", params=doors.NAMES)
def door(request):
    return request.param


@pytest.fixture(scope="module")
def reporting(door, repository):
    with doors.running_server(door, repository, "--orca-load-metrics", "--grpc-reflection=off") as process:
        yield process.address


# gRPC's C core keeps this trailer for its balancers and does not show it to applications, so the client is a raw one.


def decoded(value):
    return base64.b64decode(value + "=" * (-len(value) % 4))


def report_of(answer):
    return OrcaLoadReport.FromString(decoded({**answer.headers, **answer.trailers}[TRAILER]))


def test_every_inference_answer_carries_a_report(reporting):
    with Client(reporting) as client:
        answer = client.call(INFER, request("simple", floats(1)).SerializeToString())
    assert answer.status == 0
    report = report_of(answer)
    assert 0 <= report.cpu_utilization <= 1
    assert set(report.named_metrics) == {"queue_depth", "inflight_requests"}


def test_an_error_carries_it_beside_its_details(reporting):
    with Client(reporting) as client:
        answer = client.call(INFER, request("nope", floats(1)).SerializeToString())
    assert answer.status == grpc.StatusCode.NOT_FOUND.value[0]
    details = decoded({**answer.headers, **answer.trailers}[richerrors.KEY])
    assert richerrors.read(details).reason == "NOT_FOUND"
    report_of(answer)


def test_a_stream_carries_it_at_its_end(reporting):
    with Client(reporting) as client:
        answer = client.call(STREAM, request("simple", floats(1)).SerializeToString())
    assert len(answer.messages) == 1
    report_of(answer)


def test_other_methods_carry_none(reporting):
    with Client(reporting) as client:
        answer = client.call("/inference.GRPCInferenceService/ServerLive")
    assert answer.status == 0
    assert TRAILER not in {**answer.headers, **answer.trailers}


def test_the_report_follows_the_load(reporting):
    """The one instance of the slow model is kept busy; every batch is 0.3 s of its time."""
    message = framed(request("slow", floats(1)).SerializeToString())
    end = time.monotonic() + 60
    with Client(reporting) as client:
        while time.monotonic() < end:
            streams = [client.headers(INFER) for _ in range(20)]
            for stream in streams:
                client.data(stream, message, end=True)
            reports = [report_of(client.answer(stream)) for stream in streams]
            if any(
                report.application_utilization > 0.6
                and report.rps_fractional > 5
                and report.eps < report.rps_fractional
                and report.named_metrics["inflight_requests"] > 0
                for report in reports
            ):
                return
    pytest.fail(f"the last report: {reports[-1]}")


def test_without_the_option_there_is_none(door, repository):
    with (
        doors.running_server(door, repository) as process,
        grpc.insecure_channel(process.address) as channel,
        Client(process.address) as client,
    ):
        answer = client.call(INFER, request("simple", floats(1)).SerializeToString())
        assert TRAILER not in {**answer.headers, **answer.trailers}
        assert ProtoReflectionDescriptorDatabase(channel).get_services()  # loopback: reflection is on


def test_reflection_may_be_off(reporting):
    with grpc.insecure_channel(reporting) as channel, pytest.raises(grpc.RpcError) as error:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_may_be_on_at_a_public_address(door, repository):
    """Where it is off unless it is asked for: tests.front.test_listener_rules."""
    with (
        doors.running_server(door, repository, "--grpc-address=0.0.0.0", "--grpc-reflection=on") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        assert ProtoReflectionDescriptorDatabase(channel).get_services()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("unix:/run/x.sock", True),
        ("unix:///run/x.sock", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_who_can_connect(address, local):
    assert parse_address(address, 8001).is_local is local
