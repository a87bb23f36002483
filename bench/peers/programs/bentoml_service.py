"""A BentoML service: the numbers of a POST to /predict come back."""

import bentoml


@bentoml.service(workers=1)
class Echo:
    @bentoml.api
    async def predict(self, numbers: list[float]) -> list[float]:
        return numbers
