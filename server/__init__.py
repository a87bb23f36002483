"""inferd: a gRPC-only inference server that speaks Triton's dialect of the KServe v2 protocol."""
