"""Server reflection through the reflection client of grpcio-reflection."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from inferd_client.pb import grpc_service_pb2 as pb

SERVICES = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "inference.GRPCInferenceService"]


@pytest.fixture
def database(channel):
    return ProtoReflectionDescriptorDatabase(channel)


def test_reflection_lists_every_service(database):
    assert sorted(database.get_services()) == SERVICES


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_described(database, service):
    assert DescriptorPool(database).FindServiceByName(service).methods


def test_the_description_is_complete(database):
    described = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
    ours = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert [(method.name, method.input_type.full_name, method.server_streaming) for method in described.methods] == [
        (method.name, method.input_type.full_name, method.server_streaming) for method in ours.methods
    ]
    config = DescriptorPool(database).FindMessageTypeByName("inference.ModelConfig")
    assert "dynamic_batching" in config.fields_by_name


def test_reflection_does_not_find_a_service_that_is_not_there(database):
    with pytest.raises(KeyError):
        DescriptorPool(database).FindServiceByName("inference.Nothing")
