"""The worker process of a Python model opens CUDA memory of a client, so that its input lies on the GPU."""

import numpy as np

from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.instances.shared_memory import SharedMemoryPolicy
from inferd.server.errors import Status
from tests.backends.python.served import add_model
from tests.engine.region_owner import placed
from tests.engine.serving import infer_all, request, serving_folder
from tests.gpu.conftest import WHOLE

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2000 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2000 ] }, { name: "device" data_type: TYPE_INT32 dims: [ 2 ] } ]
instance_group { kind: KIND_GPU count: 1 gpus: [ 0 ] }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
dynamic_batching { }
"""

# y is x, through a DLPack capsule.
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        device = pb_utils.Tensor("device", np.array([x.__dlpack_device__()], np.int32))
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", x.to_dlpack()), device])
"""


def message(values, offset):
    """x in the region at `offset`."""
    out = request(x=values)
    del out.raw_input_contents[:]
    placed(out.inputs[0], "r", values.nbytes, offset)
    return out


async def test_inputs_of_another_process(owner, tmp_path):
    add_model(tmp_path, "m", CODE, CONFIG)
    policy = SharedMemoryPolicy(shared=True, access="map")
    async with serving_folder(tmp_path, gpus=Gpus(), shared_memory=policy) as engine:
        engine.shared_memory.register_cuda(None, "r", owner.handle, 0, WHOLE)
        sent = [np.random.default_rng(i).random((1, 2000), np.float32) for i in range(16)]
        for i, values in enumerate(sent):
            owner.write(8192 * i, values.tobytes())
        for batch in (sent[:1], sent):
            answers = await infer_all(engine, *(message(values, 8192 * i) for i, values in enumerate(batch)))
            for values, answer in zip(batch, answers, strict=True):
                assert answer.status == Status.OK, answer.text
                outputs = [output.name for output in answer.response.outputs]
                found = dict(zip(outputs, answer.response.raw_output_contents, strict=True))
                assert found["y"] == values.tobytes()
                assert np.frombuffer(found["device"], np.int32).tolist() == [2, 0]  # kDLCUDA, device 0
