"""A model of the repository that did not load: the server says so everywhere, and serves the others."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors, models
from tests.conformance.client import Stub, floats, request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def channel(door, tmp_path_factory):
    if door == "target":
        pytest.skip("needs a repository with a broken model")
    root = tmp_path_factory.mktemp("broken")
    models.write_repository(root, broken=True)
    with doors.running_server(door, root) as process, grpc.insecure_channel(process.address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return Stub(channel)


def refused(call, message):
    with pytest.raises(grpc.RpcError) as caught:
        call(message)
    return caught.value.code(), caught.value.details()


def test_server_is_live_and_not_ready(stub):
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert not stub.ServerReady(pb.ServerReadyRequest()).ready


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig"])
def test_metadata_and_config_say_that_no_version_is_available(stub, method):
    code, details = refused(getattr(stub, method), getattr(pb, f"{method}Request")(name=models.BROKEN))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "has no available versions" in details


def test_it_is_not_ready(stub):
    assert not stub.ModelReady(pb.ModelReadyRequest(name=models.BROKEN)).ready


def test_an_inference_request_is_told_that_no_version_is_available(stub):
    code, details = refused(stub.ModelInfer, request(models.BROKEN, floats(1)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "has no available versions" in details


def test_statistics_of_it_are_refused_and_those_of_all_leave_it_out(stub):
    code, details = refused(stub.ModelStatistics, pb.ModelStatisticsRequest(name=models.BROKEN))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"requested model '{models.BROKEN}' is not available"
    assert models.BROKEN not in {each.name for each in stub.ModelStatistics(pb.ModelStatisticsRequest()).model_stats}


def test_the_index_has_it_with_the_reason(stub):
    entries = {model.name: model for model in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
    assert entries[models.BROKEN].state == "UNAVAILABLE"
    assert "no_such_backend" in entries[models.BROKEN].reason
    ready = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    assert models.BROKEN not in {model.name for model in ready}


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("", NOT_SERVING),
        ("inference.GRPCInferenceService", NOT_SERVING),
        (models.BROKEN, NOT_SERVING),
        ("simple", SERVING),
    ],
)
def test_the_server_and_it_are_not_serving_but_others_are(channel, name, status):
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == status


def test_the_others_are_served(stub):
    assert stub.ModelReady(pb.ModelReadyRequest(name="simple")).ready
    assert stub.ModelInfer(request("simple", floats(1))).raw_output_contents
