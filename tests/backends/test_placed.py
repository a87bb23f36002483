"""Guards tensors in shared memory with real models: results where the client wants them, inputs as they were."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from inferd.backends.onnxruntime.backend import OnnxInstance
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


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 2
        return x


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def add_one(backend, folder):
    """y is x + 1."""
    if backend == "pytorch":
        save_script(AddOne(), folder)
        return
    if backend == "openvino":
        pytest.importorskip("openvino")
        from tests.backends.openvino_models import ops, parameter, save

        given = parameter("x", "i64")
        save(folder, [given], {"y": ops.add(given, ops.constant(np.int64(1)))})
        return
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["N", 2]) for name in "xy")
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    (folder / "model.onnx").write_bytes(onnx_bytes([helper.make_node("Add", ["x", "one"], ["y"])], [x], [y], [one]))


@pytest.mark.parametrize("access", ["map", "copy"])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "pytorch"])
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
@pytest.mark.parametrize("backend", ["openvino", "pytorch"])
async def test_a_model_that_returns_its_input(tmp_path, memory, backend, access):
    """TorchScript hands out the very memory of the input: the answer must not be a window into the client's."""
    served = Served(tmp_path, None, memory, CONFIG.format(backend=backend), access=access)
    if backend == "pytorch":
        save_script(Same(), tmp_path / "m" / "1")
    else:
        pytest.importorskip("openvino")
        from tests.backends.openvino_models import parameter, save

        given = parameter("x", "i64")
        save(tmp_path / "m" / "1", [given], {"y": given})
    async with served:
        memory[:2] = 1, 2
        assert (await served.ask(placed())).array().tolist() == [[1, 2]]
        await served.ask(placed(to=1))
        assert memory[1:3].tolist() == [1, 2]


async def test_a_model_that_computes_in_place_leaves_the_client_s_memory_as_it_is(tmp_path, memory):
    served = Served(tmp_path, None, memory, CONFIG.format(backend="pytorch"), access="map")
    save_script(Double(), tmp_path / "m" / "1")
    async with served:
        memory[:2] = 1, 2
        for _ in range(3):
            assert (await served.ask(placed())).array().tolist() == [[2, 4]]
            assert memory[:2].tolist() == [1, 2]


def serve_onnx(tmp_path, memory, nodes, shape, constants=()):
    """A model of these nodes from x [N, L] to y of a shape, whose columns the configuration leaves open."""
    config = CONFIG.format(backend="onnxruntime").replace("dims: [ 2 ]", "dims: [ -1 ]")
    served = Served(tmp_path, None, memory, config)
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name, dims in (("x", ["N", "L"]), ("y", shape))
    )
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in constants]
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(onnx_bytes(nodes, [x], [y], constants))
    return served


@pytest.fixture
def bound(monkeypatch):
    """The names of outputs that ONNX Runtime was told to write to their places, run by run."""
    runs = []
    run = OnnxInstance._run_bound
    monkeypatch.setattr(
        OnnxInstance, "_run_bound", lambda self, places, *rest: runs.append([*places]) or run(self, places, *rest)
    )
    return runs


async def test_an_output_whose_dimensions_are_named_like_an_inputs_is_written_to_its_place(tmp_path, memory, bound):
    add = helper.make_node("Add", ["x", "one"], ["y"])
    async with serve_onnx(tmp_path, memory, [add], ["N", "L"], [("one", 1)]) as served:
        for columns, rows in ((2, 1), (5, 3)):
            memory[: columns * rows] = np.arange(columns * rows)
            answer = await served.ask(placed(columns, to=100, rows=rows))
            assert list(answer.response.outputs[0].shape) == [rows, columns]
            assert (memory[100 : 100 + columns * rows] == np.arange(columns * rows) + 1).all()
    assert bound == [["y"], ["y"]]


async def test_a_model_whose_names_of_dimensions_are_wrong_is_served_all_the_same(tmp_path, memory, bound):
    """Exporters do not check them. Once they were wrong, nothing is placed by them any more."""
    twice = helper.make_node("Concat", ["x", "x"], ["y"], axis=1)
    async with serve_onnx(tmp_path, memory, [twice], ["N", "L"]) as served:
        for _ in range(2):
            memory[:2] = 1, 2
            answer = await served.ask(placed(to=100, room=32))
            assert list(answer.response.outputs[0].shape) == [1, 4]
            assert memory[100:104].tolist() == [1, 2, 1, 2]
    assert bound == [["y"]]


@pytest.mark.parametrize("columns", ["L", 4])
async def test_a_place_over_an_input_is_written_to_when_the_model_has_read_it(tmp_path, memory, columns):
    backwards = helper.make_node("Slice", ["x", "start", "end", "axis", "step"], ["y"])
    constants = [("start", -1), ("end", -1000), ("axis", 1), ("step", -1)]
    async with serve_onnx(tmp_path, memory, [backwards], ["N", columns], constants) as served:
        for to in (0, 1, 3):
            memory[1:5] = 1, 2, 3, 4
            await served.ask(placed(4, at=1, to=to))
            assert memory[to : to + 4].tolist() == [4, 3, 2, 1]
