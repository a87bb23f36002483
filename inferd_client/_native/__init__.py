"""The native part of the client and of the load driver: HTTP/2, gRPC's framing, the messages of ModelInfer."""
