"""Connections without I/O: HTTP/2, gRPC framing, compression, limits."""
