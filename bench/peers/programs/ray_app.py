"""Ray Serve's gRPC ingress: OUTPUT0 is INPUT0. Run as: ray_app.py GRPC_PORT HTTP_PORT"""

import signal
import sys

from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from inferd_client.pb import grpc_service_pb2 as pb


def add_service(servicer, server) -> None:
    """What grpcio-tools would generate for the one method that is asked."""
    import grpc

    handler = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    handlers = {"ModelInfer": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))


@serve.deployment(max_ongoing_requests=256)
class Echo:
    async def ModelInfer(self, request):  # noqa: N802 - the method's name in the protocol
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version="1")
        tensor = request.inputs[0]
        answer.outputs.add(name="OUTPUT0", datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(request.raw_input_contents[0])
        return answer


if __name__ == "__main__":
    grpc_port, http_port = map(int, sys.argv[1:])
    serve.start(
        http_options=HTTPOptions(port=http_port),
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=["ray_app.add_service"]),
    )
    serve.run(Echo.bind())
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
