"""Messages generated from `proto/` by `tools/generate_pb.py`: `from inferd_client.pb import grpc_service_pb2 as pb`.

They live in a descriptor pool of their own: tritonclient registers the same file and message names in the default pool,
where a second definition would be a conflict as soon as both are imported by one process.
"""

from google.protobuf.descriptor_pool import DescriptorPool

pool = DescriptorPool()
"""The descriptors of the service; server reflection must be given this pool."""
