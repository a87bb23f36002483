"""Shows models on a real GPU behind a real engine: identity, TorchScript, with and without CUDA graphs."""

import numpy as np
import pytest

from backends.loader import BackendLoader
from server.engine.config import Options
from server.engine.engine import Engine
from server.engine.gpu import Gpus
from server.engine.instances import Placement
from tests.engine.serving import infer_all, request

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


async def check(root, config, function):
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "config.pbtxt").write_text(config)
    gpus = Gpus()
    engine = Engine([root], BackendLoader(), Options(gpus=gpus.count), placement=Placement(gpus=gpus))
    assert await engine.start() == []
    try:
        random = np.random.default_rng(1)
        sent = [random.random((1 + i % 4, 1000), np.float32) for i in range(400)]
        answers = await infer_all(engine, *(request(x=each) for each in sent))
        name = "y" if "identity" in config else "y__0"
        for each, answer in zip(sent, answers, strict=True):
            np.testing.assert_allclose(answer.array(name), function(each), rtol=1e-4, atol=1e-4)
    finally:
        await engine.close()


@pytest.mark.parametrize("graphs", ["", GRAPHS])
async def test_identity(gpu, tmp_path, graphs):
    await check(tmp_path, IDENTITY + graphs, lambda x: x)


@pytest.mark.parametrize("graphs", ["", GRAPHS])
async def test_torchscript(gpu, tmp_path, graphs):
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
