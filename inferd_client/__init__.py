"""A client for the KServe v2 protocol with Triton's extensions: `tritonclient`'s API on native HTTP/2.

    import inferd_client.grpc as grpcclient         # instead of tritonclient.grpc
    import inferd_client.grpc.aio as grpcclient     # instead of tritonclient.grpc.aio

It needs neither the server of this project nor grpcio. `inferd_client.driver` is the load driver behind `inferd perf`.
"""

try:
    import inferd_client._native.link  # noqa: F401 - whether it is there
except ImportError as error:
    raise ImportError(
        f"the native part of inferd_client cannot be imported ({error}), and there is no other: in a source tree "
        "`make build` makes it, wheels bring it for the Python they are named after"
    ) from error
