"""The native hot path: HTTP/2 and gRPC framing, protobuf decoding, lanes, batches, memory, and the way back.

Nothing here imports anything else of this project.
"""
