"""Messages of models' configurations, under the name that they have in tritonclient."""

from inferd_client.pb import model_config_pb2
from inferd_client.pb.model_config_pb2 import *  # noqa: F403

DESCRIPTOR = model_config_pb2.DESCRIPTOR
