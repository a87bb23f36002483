"""An MLServer runtime: OUTPUT0 is INPUT0."""

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Echo(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        tensor = payload.inputs[0]
        output = ResponseOutput(
            name="OUTPUT0",
            shape=tensor.shape,
            datatype=tensor.datatype,
            data=tensor.data,
            parameters=tensor.parameters,
        )
        return InferenceResponse(model_name=self.name, outputs=[output])
