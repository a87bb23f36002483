"""Guards tensors in shared memory with real models: results where the client wants them, inputs as they were."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.backends.models import onnx_bytes, save_script
from tests.engine.placing import Served, memory, placed
from tests.engine.serving import request

__all__ = ["memory"]

torch = pytest.importorskip("torch")

CONFIG = """
backend: "{backend}"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_INT64 dims: [ 2 ] }}
output {{ name: "y" data_type: TYPE_INT64 dims: [ 2 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""


class AddOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def add_one(backend, folder):
    if backend == "pytorch":
        save_script(AddOne(), folder)
        return
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N", 2]) for name in "xy")
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    (folder / "model.onnx").write_bytes(onnx_bytes([helper.make_node("Add", ["x", "one"], ["y"])], [x], [y], [one]))


@pytest.mark.parametrize("access", ["map", "copy"])
@pytest.mark.parametrize("backend", ["onnxruntime", "pytorch"])
async def test_results_are_where_the_client_wants_them(tmp_path, memory, backend, access):
    served = Served(tmp_path, None, memory, CONFIG.format(backend=backend), access=access)
    add_one(backend, tmp_path / "m" / "1")
    async with served:
        for rows in (1, 3):
            content = np.arange(2 * rows) * 10
            memory[: 2 * rows] = content
            answer = await served.ask(placed(to=100, rows=rows))
            assert list(answer.response.outputs[0].shape) == [rows, 2]
            assert list(answer.response.raw_output_contents) == [b""]
            np.testing.assert_array_equal(memory[100 : 100 + 2 * rows], content + 1)
            np.testing.assert_array_equal(memory[: 2 * rows], content)
        memory[:2] = 5, 6
        assert (await served.ask(placed())).array().tolist() == [[6, 7]]
        assert (await served.ask(request(x=np.array([[1, 2]])))).array().tolist() == [[2, 3]]


@pytest.mark.parametrize("access", ["map", "copy"])
async def test_a_model_that_returns_its_input(tmp_path, memory, access):
    """TorchScript hands out the very memory of the input: the answer must not be a window into the client's."""
    served = Served(tmp_path, None, memory, CONFIG.format(backend="pytorch"), access=access)
    save_script(Same(), tmp_path / "m" / "1")
    async with served:
        memory[:2] = 1, 2
        assert (await served.ask(placed())).array().tolist() == [[1, 2]]
        await served.ask(placed(to=1))
        assert memory[1:3].tolist() == [1, 2]
