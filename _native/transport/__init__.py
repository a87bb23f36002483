"""Connections: HTTP/2, gRPC framing, compression, TLS and limits, and the I/O threads that serve the sockets."""
