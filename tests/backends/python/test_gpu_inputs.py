"""Guards inputs that clients have put on the GPU of a Python model: where it sees them, and that they are let go of.

On the stub driver; the worker process has one of its own, whose report must be clean when the process has ended.
"""

import asyncio
import gc
from contextlib import asynccontextmanager

import numpy as np
import pytest

from inferd.backends.python.worker import device
from inferd.server.engine.instances.shared_memory import CUDA, SharedMemoryPolicy
from inferd.server.errors import Status
from tests import gpu_stub
from tests.backends.python.served import add_model
from tests.engine.region_owner import RegionOwner, placed
from tests.engine.serving import gpus_of_stub, infer, request, serving_folder
from tests.gpu_stub.fixtures import stub

__all__ = ["stub"]

pytestmark = pytest.mark.usefixtures("native_counters", "stub")

KDL_CUDA = 2
ON_GPU, GAP, OPENED, CLOSED, WAITED = range(5)  # in `said`
KEEP, LET_GO, FAIL_TO_OPEN, LATER = 1, 2, 3, 4

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "b" data_type: TYPE_FP32 dims: [ -1 ] } ]
input { name: "order" data_type: TYPE_INT64 dims: [ 1 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "said" data_type: TYPE_INT64 dims: [ 5 ] } ]
instance_group { kind: KIND_GPU count: 1 }
"""
NO = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }\n'
YES = NO.replace('"no"', '"yes"')
IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "in-process" } }\n'

# y is b, where it lies; `said` is how they came, and how often the driver was asked to open memory, to close it, and to
# wait for the GPU.
CODE = """
import ctypes, threading
import numpy as np
import triton_python_backend_utils as pb_utils

driver = ctypes.CDLL({library!r})
driver.stub_calls.restype = ctypes.c_uint64
driver.stub_fail.argtypes = (ctypes.c_char_p, ctypes.c_longlong, ctypes.c_int)
address = ctypes.pythonapi.PyCapsule_GetPointer
address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

def pointer(tensor):
    capsule = tensor.to_dlpack()
    return ctypes.c_void_p.from_address(address(capsule, b"dltensor")).value  # DLTensor begins with its data

class TritonPythonModel:
    kept = None

    def initialize(self, args):
        self.next_one = threading.Event()

    def execute(self, requests):
        order = int(pb_utils.get_input_tensor_by_name(requests[0], "order").as_numpy().flat[0])
        if order == {LATER}:
            threading.Thread(target=self.answer_later, args=(requests[0], requests[0].get_response_sender())).start()
            return [None]
        self.next_one.set()
        return [self.answer(request) for request in requests]

    def answer_later(self, request, sender):
        self.next_one.wait()
        sender.send(self.answer(request), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, request):
        a, b, order = (pb_utils.get_input_tensor_by_name(request, name) for name in ("a", "b", "order"))
        order = int(order.as_numpy().flat[0])
        if order == {KEEP}:
            self.kept = a
        if order == {LET_GO}:
            self.kept = None
        if order == {FAIL_TO_OPEN}:
            driver.stub_fail(b"cuIpcOpenMemHandle_v2", 0, 1)
        assert a.is_cpu() == (a.__dlpack_device__() == (1, 0)) == b.is_cpu()
        if not a.is_cpu():
            assert a.__dlpack_device__() == ({KDL_CUDA}, 0)
            y = pb_utils.Tensor.from_dlpack("y", a.to_dlpack())
            assert not y.is_cpu()
            assert np.array_equal(y.as_numpy(), a.as_numpy())
            y = pb_utils.Tensor.from_dlpack("y", b)
        else:
            y = pb_utils.Tensor("y", b.as_numpy())
        gap = pointer(b) - pointer(a)
        names = (b"cuIpcOpenMemHandle_v2", b"cuIpcCloseMemHandle", b"cuCtxSynchronize")
        calls = [driver.stub_calls(name) for name in names]
        said = np.array([[not a.is_cpu(), gap, *calls]], np.int64)
        return pb_utils.InferenceResponse([y, pb_utils.Tensor("said", said)])
"""
A = np.arange(2000, dtype=np.float32).reshape(1, 2000)
B = A * 3 + 1
A_AT, B_AT = 256, 12288
SIZE = 32768


@pytest.fixture(scope="module")
def client():
    client = RegionOwner(size=SIZE)
    client.write(A_AT, A.tobytes())
    client.write(B_AT, B.tobytes())
    yield client
    client.close()


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The file to which the worker's stub writes its report when the process ends."""
    path = tmp_path / "report"
    monkeypatch.setenv("CUDA_STUB_REPORT", str(path))
    yield path
    gc.collect()


@asynccontextmanager
async def serving(root, client, config=CONFIG + NO, access="map"):
    """The model and the client's region "r"."""
    code = CODE
    for name, value in {"library!r": repr(str(gpu_stub.library())), "KEEP": KEEP, "LET_GO": LET_GO,
                        "FAIL_TO_OPEN": FAIL_TO_OPEN, "LATER": LATER, "KDL_CUDA": KDL_CUDA}.items():  # fmt: skip
        code = code.replace(f"{{{name}}}", str(value))
    add_model(root, "m", code, config)
    policy = SharedMemoryPolicy(shared=True, access=access)
    async with serving_folder(root, gpus=gpus_of_stub(), shared_memory=policy) as engine:
        engine.shared_memory.register_cuda(None, "r", client.handle, 0, SIZE)
        yield engine


async def ask(engine, order=0, in_region=True):
    """Send a and b; the answer, with `said` and y where there are some."""
    message = request(a=A, b=B, order=np.array([[order]], np.int64))
    if in_region:
        last = message.raw_input_contents[2]
        del message.raw_input_contents[:]
        message.raw_input_contents.append(last)
        placed(message.inputs[0], "r", A.nbytes, A_AT)
        placed(message.inputs[1], "r", B.nbytes, B_AT)
    return await infer(engine, message)


async def said(engine, order=0, in_region=True):
    answer = await ask(engine, order, in_region)
    assert answer.status == Status.OK, answer.text
    names = [output.name for output in answer.response.outputs]
    found = dict(zip(names, answer.response.raw_output_contents, strict=True))
    assert found["y"] == B.tobytes()
    return np.frombuffer(found["said"], np.int64).tolist()


async def test_they_stay_on_the_gpu_and_are_opened_once_for_as_long_as_they_are_used(tmp_path, client, report):
    async with serving(tmp_path, client) as engine:
        assert await said(engine) == [1, B_AT - A_AT, 1, 0, 0]
        after = await said(engine, in_region=False)
        assert (after[ON_GPU], *after[OPENED:]) == (0, 1, 1, 1), "closed after the last use, when the GPU is idle"
        assert await said(engine) == [1, B_AT - A_AT, 2, 1, 1]
    assert report.read_text().splitlines() == ["alive: the context of device 0, 1 times"]


async def test_what_the_model_keeps_stays_open(tmp_path, client, report):
    async with serving(tmp_path, client) as engine:
        await said(engine, KEEP)
        assert (await said(engine))[OPENED:] == [1, 0, 1], "the GPU is idle before the client hears"
        engine.shared_memory.unregister(None, CUDA, "r")
        assert (await said(engine, LET_GO, in_region=False))[OPENED:] == [1, 1, 3]
    assert not [line for line in report.read_text().splitlines() if "context" not in line]


async def test_what_is_answered_later_is_opened_later(tmp_path, client, report):
    """The request uses the region for so long, though nobody can name it any more."""
    async with serving(tmp_path, client) as engine:
        later = asyncio.ensure_future(said(engine, LATER))
        await asyncio.sleep(0)
        engine.shared_memory.unregister(None, CUDA, "r")
        assert engine.shared_memory.regions.count == 1
        assert (await said(engine, in_region=False))[ON_GPU] == 0
        assert (await later)[ON_GPU] == 1
        assert engine.shared_memory.regions.count == 0
    assert not [line for line in report.read_text().splitlines() if "context" not in line]


@pytest.mark.parametrize(
    ("config", "access"),
    [
        (CONFIG, "map"),
        (CONFIG + YES, "map"),
        (CONFIG.replace("KIND_GPU", "KIND_CPU") + NO, "map"),
        (CONFIG + NO, "copy"),
    ],
    ids=["by default", "yes", "an instance on the CPU", "a client that is not trusted"],
)
async def test_they_are_on_the_cpu_otherwise(tmp_path, client, report, config, access):
    async with serving(tmp_path, client, config, access) as engine:
        assert (await said(engine))[ON_GPU] == 0
    assert not report.exists(), "the worker has used the driver"


@pytest.fixture
def contexts(stub, monkeypatch):
    """What the worker's side has of the driver, in this process: it never gives a context back."""
    retained = {}
    monkeypatch.setattr(device, "_contexts", retained)
    monkeypatch.setattr(device, "_driver", None)
    yield
    for ordinal in retained:
        assert stub.lib.cuDevicePrimaryCtxRelease_v2(ordinal) == 0


@pytest.mark.usefixtures("contexts")
async def test_a_model_in_the_server(tmp_path, client):
    async with serving(tmp_path, client, CONFIG + NO + IN_PROCESS) as engine:
        found = await said(engine)
        assert (found[ON_GPU], found[GAP]) == (1, B_AT - A_AT)


async def test_memory_that_is_not_opened_fails_the_request_alone(tmp_path, client):
    async with serving(tmp_path, client) as engine:
        answer = await ask(engine, FAIL_TO_OPEN)
        assert answer.status == Status.INTERNAL
        assert "memory of GPU 0 that a client shares cannot be opened: the CUDA driver says: " in answer.text
        assert (await said(engine))[ON_GPU] == 1


async def test_the_parameter_is_yes_or_no(tmp_path):
    add_model(tmp_path, "m", "", CONFIG + NO.replace('"no"', '"maybe"'))
    async with serving_folder(tmp_path, problems=1, gpus=gpus_of_stub()) as engine:
        assert "parameter 'FORCE_CPU_ONLY_INPUT_TENSORS' is 'maybe', expected yes or no" in str(engine.problems)
