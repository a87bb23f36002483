"""Shows CUDA shared memory on a real GPU: memory of another process that a model reads and writes."""

import numpy as np
import pytest

from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.instances.shared_memory import SharedMemoryPolicy
from inferd.server.errors import Status
from tests.engine.region_owner import SIZE, placed
from tests.engine.serving import infer_all, request, serving_folder

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 16 ] }
instance_group { kind: KIND_GPU count: 1 gpus: [ 0 ] }
dynamic_batching { }
"""


def message(values, offset):
    """x in the region at `offset`, y 4096 bytes behind."""
    out = request(x=values)
    del out.raw_input_contents[:]
    placed(out.inputs[0], "r", values.nbytes, offset)
    placed(out.outputs.add(name="y"), "r", values.nbytes, 4096 + offset)
    return out


@pytest.mark.parametrize("access", ["map", "copy"])
@pytest.mark.parametrize("kind", ["KIND_GPU", "KIND_CPU"])
@pytest.mark.parametrize("step", [256, 100])
async def test_inputs_and_outputs_of_another_process(owner, tmp_path, access, kind, step):
    """In place or by copies, aligned or not, one at a time and in batches; for a model on the CPU through the host."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG.replace("KIND_GPU", kind).replace("gpus: [ 0 ]", ""))
    policy = SharedMemoryPolicy(shared=True, access=access)
    async with serving_folder(tmp_path, gpus=Gpus(), shared_memory=policy) as engine:
        engine.shared_memory.register_cuda(None, "r", owner.handle, 0, SIZE)
        sent = [np.random.default_rng(i).random((1, 16), np.float32) for i in range(16)]
        for i, values in enumerate(sent):
            owner.write(step * i, values.tobytes())
        for batch in (sent[:1], sent):
            answers = await infer_all(engine, *(message(values, step * i) for i, values in enumerate(batch)))
            assert [answer.status for answer in answers] == [Status.OK] * len(batch), answers[0].text
            for i, values in enumerate(batch):
                assert owner.read(4096 + step * i, values.nbytes) == values.tobytes()
