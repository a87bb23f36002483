"""Shows models on a real GPU behind a real engine: identity, PyTorch's and ONNX Runtime's, with and without graphs."""

import numpy as np
import pytest

from inferd.server.engine.instances.gpu import Gpus
from tests.backends.models import onnx_bytes
from tests.engine.serving import infer_all, request, serving_folder

IDENTITY = """
backend: "identity"
max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: [ 1000 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1000 ] }
instance_group { kind: KIND_GPU count: 2 }
dynamic_batching { }
"""
LINEAR = IDENTITY.replace('"identity"', '"pytorch"').replace('"y"', '"y__0"').replace("count: 2", "count: 1")
GRAPHS = "optimization { cuda { graphs: true } }"


async def check(root, config, function, output=""):
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "config.pbtxt").write_text(config)
    async with serving_folder(root, gpus=Gpus()) as engine:
        random = np.random.default_rng(1)
        sent = [random.random((1 + i % 4, 1000), np.float32) for i in range(400)]
        answers = await infer_all(engine, *(request(x=each) for each in sent))
        name = output or ("y" if "identity" in config else "y__0")
        for each, answer in zip(sent, answers, strict=True):
            np.testing.assert_allclose(answer.array(name), function(each), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graphs", ["", GRAPHS])
async def test_identity_returns_what_it_gets_from_the_gpu(gpu, tmp_path, graphs):
    await check(tmp_path, IDENTITY + graphs, lambda x: x)


@pytest.mark.parametrize("graphs", ["", GRAPHS])
async def test_torchscript_answers_as_pytorch_does(gpu, tmp_path, graphs):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a build of PyTorch for CUDA")
    module = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU()).eval()
    (tmp_path / "m" / "1").mkdir(parents=True)
    torch.jit.script(module).save(str(tmp_path / "m" / "1" / "model.pt"))

    def function(x):
        with torch.no_grad():
            return module(torch.from_numpy(x)).numpy()

    await check(tmp_path, LINEAR + graphs, function)


@pytest.mark.parametrize("graphs", ["", GRAPHS])
async def test_compiled(gpu, tmp_path, graphs):
    """AOTInductor, compiled here for the GPU that is here."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a build of PyTorch for CUDA")
    module = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU()).eval().cuda()
    (tmp_path / "m" / "1").mkdir(parents=True)
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(module, (torch.zeros(3, 1000, device="cuda"),), dynamic_shapes=({0: batch},))
    path = str(tmp_path / "m" / "1" / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    module.cpu()

    def function(x):
        with torch.no_grad():
            return module(torch.from_numpy(x)).numpy()

    config = LINEAR.replace('backend: "pytorch"', 'platform: "torch_aoti"')
    await check(tmp_path, config + graphs, function)


ONNX = IDENTITY.replace('"identity"', '"onnxruntime"')
ACCELERATOR = 'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "{}" }} }} }}'


@pytest.mark.parametrize("accelerator", ["", "cuda", "tensorrt"])
@pytest.mark.parametrize("dims", [1000, "M"])
async def test_onnx(gpu, tmp_path, accelerator, dims):
    """With outputs whose shape is fixed, and with those that the runtime places."""
    onnxruntime = pytest.importorskip("onnxruntime")
    wanted = "TensorrtExecutionProvider" if accelerator == "tensorrt" else "CUDAExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        pytest.skip(f"needs a build of ONNX Runtime with {wanted}")
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", dims]) for name in "xy")
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Exp", ["n"], ["y"])]
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(onnx_bytes(nodes, [x], [y]))
    config = ONNX + (ACCELERATOR.format(accelerator) if accelerator else "")
    await check(tmp_path, config, lambda array: np.exp(-array), output="y")
