"""Messages of the protocol, under the name that they have in tritonclient."""

from inferd_client.pb import grpc_service_pb2
from inferd_client.pb.grpc_service_pb2 import *  # noqa: F403

DESCRIPTOR = grpc_service_pb2.DESCRIPTOR
