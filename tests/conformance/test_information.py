"""Health, metadata, configuration, statistics and the index, through raw stubs."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from inferd.server.rpc.metadata import EXTENSIONS
from inferd_client.pb import grpc_service_pb2 as pb
from inferd_client.pb import model_config_pb2 as config_pb
from tests.conformance import models
from tests.conformance.client import SERVICE, floats, request


def refused(call, message, **arguments):
    """(code, details) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(message, **arguments)
    return caught.value.code(), caught.value.details()


# ---- health ----


def test_a_server_that_serves_is_live(stub):
    assert stub.ServerLive(pb.ServerLiveRequest()) == pb.ServerLiveResponse(live=True)


def test_server_ready_follows_the_models(stub, control):
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    control.set_ready("versions", 3, False)
    try:
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
    finally:
        control.set_ready("versions", 3, True)
    assert stub.ServerReady(pb.ServerReadyRequest()).ready


@pytest.mark.parametrize(("name", "version"), [("simple", ""), ("simple", "1"), ("versions", "1"), ("versions", "3")])
def test_each_loaded_version_is_ready(stub, name, version):
    assert stub.ModelReady(pb.ModelReadyRequest(name=name, version=version)).ready


LOOKUP_ERRORS = [
    ("nothing", "", "NOT_FOUND", "Request for unknown model: 'nothing' is not found"),
    ("nothing", "1", "NOT_FOUND", "unknown model"),
    ("", "", "NOT_FOUND", "Request for unknown model: '' is not found"),
    ("versions", "2", "NOT_FOUND", "is not found"),
    ("simple", "x", "INVALID_ARGUMENT", "failed to get model version from specified version string 'x' (details: stol),"
                                        " version should be an integral value > 0"),
    ("simple", "-2", "INVALID_ARGUMENT", "invalid model version specified"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "version", "code", "text"), LOOKUP_ERRORS)
@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig"])
def test_model_lookup_errors(stub, method, name, version, code, text):
    message = getattr(pb, f"{method}Request")(name=name, version=version)
    got, details = refused(getattr(stub, method), message)
    assert got.name == code
    assert text in details


@pytest.mark.parametrize(("name", "version", "code", "text"), LOOKUP_ERRORS)
def test_what_is_not_there_is_not_ready(stub, name, version, code, text):
    """ModelReady answers false instead of NOT_FOUND, because programs poll it. Only a malformed version is an error."""
    message = pb.ModelReadyRequest(name=name, version=version)
    if code == "NOT_FOUND":
        assert stub.ModelReady(message) == pb.ModelReadyResponse(ready=False)
        return
    got, details = refused(stub.ModelReady, message)
    assert got.name == code
    assert text in details


def test_a_version_that_is_not_ready(stub, control):
    control.set_ready("versions", 3, False)
    try:
        code, details = refused(stub.ModelConfig, pb.ModelConfigRequest(name="versions", version="3"))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "is not at ready state" in details
        assert not stub.ModelReady(pb.ModelReadyRequest(name="versions", version="3")).ready
        assert stub.ModelReady(pb.ModelReadyRequest(name="versions")).ready  # version 1 is the latest ready one now
    finally:
        control.set_ready("versions", 3, True)


# ---- metadata and configuration ----


def test_the_server_names_itself_and_its_extensions_as_triton_does(stub):
    metadata = stub.ServerMetadata(pb.ServerMetadataRequest())
    assert metadata.name == "triton"
    assert metadata.version
    assert tuple(metadata.extensions) == EXTENSIONS
    assert {"sequence", "schedule_policy", "model_repository(unload_dependents)"} < set(metadata.extensions)


def test_model_metadata_with_a_batch_dimension(stub):
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="pair"))
    tensor = pb.ModelMetadataResponse.TensorMetadata
    assert metadata == pb.ModelMetadataResponse(
        name="pair",
        versions=["1"],
        platform="identity",
        inputs=[
            tensor(name="INPUT0", datatype="FP32", shape=[-1, 4]),
            tensor(name="INPUT1", datatype="INT32", shape=[-1, 2, 2]),
        ],
        outputs=[
            tensor(name="OUTPUT0", datatype="FP32", shape=[-1, 4]),
            tensor(name="OUTPUT1", datatype="INT32", shape=[-1, 2, 2]),
        ],
    )


def test_model_metadata_without_a_batch_dimension(stub):
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="whole"))
    assert [list(tensor.shape) for tensor in metadata.inputs] == [[2, -1]]


@pytest.mark.parametrize(("asked", "shown"), [("", ["1", "3"]), ("1", ["1"]), ("3", ["3"])])
def test_versions_in_the_metadata(stub, asked, shown):
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="versions", version=asked)).versions == shown


def test_model_config_is_the_complete_one(stub):
    config = stub.ModelConfig(pb.ModelConfigRequest(name="pair")).config
    assert config.name == "pair"
    assert config.backend == "identity"
    assert config.max_batch_size == 8
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.input] == [
        ("INPUT0", config_pb.TYPE_FP32, [4]),
        ("INPUT1", config_pb.TYPE_INT32, [2, 2]),
    ]
    assert config.version_policy.HasField("latest") or config.version_policy.HasField("all")
    assert config.instance_group[0].count == 1
    assert config.HasField("dynamic_batching")


# ---- statistics ----


def test_statistics_count_inferences(stub):
    def counts():
        (statistics,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name="simple")).model_stats
        return statistics

    before = counts()
    stub.ModelInfer(request("simple", np.zeros((3, 2), np.float32)))
    after = counts()
    assert (after.name, after.version) == ("simple", "1")
    assert after.inference_count - before.inference_count == 3
    assert after.execution_count - before.execution_count == 1
    assert after.inference_stats.success.count - before.inference_stats.success.count == 1
    assert after.inference_stats.queue.count == after.inference_stats.success.count
    assert after.last_inference >= before.last_inference
    assert after.last_inference > 1_600_000_000_000  # milliseconds since the epoch


def test_statistics_of_all_models_and_of_versions(stub):
    def named(**asked):
        response = stub.ModelStatistics(pb.ModelStatisticsRequest(**asked))
        return [(statistics.name, statistics.version) for statistics in response.model_stats]

    everything = named()
    assert len(set(everything)) == len(everything)
    assert {("simple", "1"), ("versions", "1"), ("versions", "3")} <= set(everything)
    assert named(name="versions") == [("versions", "1"), ("versions", "3")]
    assert named(name="versions", version="3") == [("versions", "3")]


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("nothing", "", "requested model 'nothing' is not available"),
        ("versions", "2", "requested model version is not available for model"),
        ("versions", "x", "failed to get model version from specified version string 'x'"),
    ],
)
def test_statistics_of_what_is_not_served_are_refused_with_tritons_text(stub, name, version, text):
    code, details = refused(stub.ModelStatistics, pb.ModelStatisticsRequest(name=name, version=version))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text in details


# ---- index ----


def test_the_index_says_that_loaded_versions_are_ready(stub):
    entries = {(model.name, model.version): model for model in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
    assert entries["simple", "1"].state == "READY"
    assert entries["versions", "3"].state == "READY"


def test_index_of_ready_models(stub):
    entries = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    assert {model.state for model in entries} == {"READY"}
    assert {model.name for model in entries} == set(models.MODELS)


def test_index_of_a_repository_by_name(stub):
    code, details = refused(stub.RepositoryIndex, pb.RepositoryIndexRequest(repository_name="main"))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details == "'repository_name' specification is not supported"


# ---- the rest of the service ----


@pytest.mark.parametrize("name", sorted(set(SERVICE.methods_by_name) - {"ModelInfer", "ModelStreamInfer"}))
def test_bytes_that_are_no_message(stub, name):
    code, details = refused(stub.raw(name), b"\x0a\xff")
    assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)
    assert details
    assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_long_names_do_not_break_the_answer(stub):
    code, details = refused(stub.ModelConfig, pb.ModelConfigRequest(name="é" * 100_000))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.startswith("Request for unknown model: 'éé")
    code, details = refused(stub.ModelInfer, request("é" * 100_000, floats(1)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.startswith("Request for unknown model: 'éé")
