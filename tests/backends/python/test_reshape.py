"""Guards `reshape`: the model sees and answers its shapes, the client sends and gets those of `dims`, as in Triton."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from tests.backends.python.served import add_model, serving
from tests.engine.serving import infer, request

# Answers the shape that it saw, the input as it came, and a sum over each row with a dimension of its own.
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def answer(self, x):
        shapes = np.array([x.shape[1:]] * len(x), np.int64)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("seen", shapes), pb_utils.Tensor("same", x), pb_utils.Tensor("sum", x.sum(axis=(1, 2))),
            pb_utils.Tensor("asked", x.reshape(len(x), -1, 2)),
        ])
"""

CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] reshape { shape: [ 1, -1 ] } }
output { name: "seen" data_type: TYPE_INT64 dims: [ 2 ] }
output { name: "same" data_type: TYPE_INT64 dims: [ -1 ] reshape { shape: [ 1, -1 ] } }
output { name: "sum" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "asked" data_type: TYPE_INT64 dims: [ -1, 2 ] reshape { shape: [ -1, 1, 2 ] } }
instance_group { kind: KIND_CPU }
"""


def test_outputs_of_python_models_have_the_configured_shape(tmp_path: Path) -> None:
    async def check() -> None:
        add_model(tmp_path, "m", CODE, CONFIG)
        async with serving(tmp_path) as engine:
            x = np.arange(12, dtype=np.int64).reshape(3, 4)
            answer = await infer(engine, request(x=x))
            assert answer.status == 0, answer.text
            assert answer.array("seen").tolist() == [[1, 4]] * 3
            np.testing.assert_array_equal(answer.array("same"), x)
            np.testing.assert_array_equal(answer.array("sum"), x.sum(1, keepdims=True))
            np.testing.assert_array_equal(answer.array("asked"), x.reshape(3, 2, 2), "a model may answer with `dims`")

    asyncio.run(check())
