"""A server of the KServe SDK: OUTPUT0 is INPUT0. Run as: kserve_server.py GRPC_PORT HTTP_PORT"""

import sys

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class Echo(Model):
    def __init__(self) -> None:
        super().__init__("identity")
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:  # noqa: ARG002
        tensor = payload.inputs[0]
        output = InferOutput(name="OUTPUT0", shape=tensor.shape, datatype=tensor.datatype)
        output.set_data_from_numpy(tensor.as_numpy(), binary_data=True)
        return InferResponse(response_id=payload.id or "", model_name=self.name, infer_outputs=[output])


if __name__ == "__main__":
    grpc_port, http_port = map(int, sys.argv[1:])
    ModelServer(grpc_port=grpc_port, http_port=http_port, enable_grpc=True, access_log_format=None).start([Echo()])
