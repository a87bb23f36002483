"""Guards what a backend sees: every datatype in numpy, torch and raw bytes without a copy, alive as long as it is used;
and what it may hand over: any C-contiguous array of the right datatype, taken in place and released once.
"""

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from inferd._native.memory.resource import live_counters
from inferd.server.errors import Status
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.serving import DTYPES, infer, infer_all, request, row, serving
from tests.threads import in_threads

BF16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = {**{name: np.dtype(dtype) for name, dtype in DTYPES.items()}, "BF16": BF16}
TORCH = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "BF16": torch.bfloat16,
}


pytestmark = pytest.mark.usefixtures("native_counters")


def config(datatype):
    return f"""
        backend: "puppet" max_batch_size: 8 dynamic_batching {{ }}
        input {{ name: "x" data_type: TYPE_{datatype} dims: [ -1 ] }}
        output {{ name: "y" data_type: TYPE_{datatype} dims: [ -1 ] }}
    """


def values(datatype, shape=(2, 3)):
    array = np.arange(np.prod(shape)).reshape(shape) % 2 if datatype == "BOOL" else np.arange(6).reshape(shape) + 1
    return array.astype(NUMPY[datatype])


def message(datatype, array):
    out = pb.ModelInferRequest(model_name="m", raw_input_contents=[array.tobytes()])
    out.inputs.add(name="x", datatype=datatype, shape=array.shape)
    return out


async def roundtrip(tmp_path, datatype, execute, array=None):
    """Have a model make y of an array; return y's raw bytes."""
    array = values(datatype) if array is None else array
    async with serving(tmp_path, execute, m=config(datatype)) as engine:
        answer = await infer(engine, message(datatype, array))
        assert answer.status == Status.OK, answer.text
        [output] = answer.response.outputs
        assert (output.datatype, tuple(output.shape)) == (datatype, array.shape)
        return answer.response.raw_output_contents[0]


@pytest.mark.parametrize("datatype", NUMPY)
async def test_numpy_in_and_out(tmp_path, datatype):
    def execute(batch):
        view = batch.input("x")
        array = view.numpy()
        assert (view.datatype, array.dtype, array.shape) == (datatype, NUMPY[datatype], view.shape)
        assert array.flags.writeable
        assert array.ctypes.data == np.frombuffer(view, np.uint8).ctypes.data
        batch.set_output("y", array.copy())

    assert await roundtrip(tmp_path, datatype, execute) == values(datatype).tobytes()


@pytest.mark.parametrize("datatype", TORCH)
async def test_torch_in_and_out(tmp_path, datatype):
    def execute(batch):
        view = batch.input("x")
        tensor = torch.from_dlpack(view)
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH[datatype], view.shape)
        assert tensor.data_ptr() == np.frombuffer(view, np.uint8).ctypes.data
        batch.set_output("y", tensor.clone())

    assert await roundtrip(tmp_path, datatype, execute) == values(datatype).tobytes()


async def test_bfloat16_as_bits(tmp_path):
    """Who has no bfloat16 hands over its bits."""

    def execute(batch):
        batch.set_output("y", batch.input("x").numpy().view(np.uint16))

    assert await roundtrip(tmp_path, "BF16", execute) == values("BF16").tobytes()


async def test_arrays_without_elements_go_in_and_out_of_numpy_and_torch(tmp_path):
    empty = np.empty((2, 0), np.float32)
    assert await roundtrip(tmp_path, "FP32", lambda b: b.set_output("y", b.input("x").numpy()), empty) == b""
    assert await roundtrip(tmp_path, "FP32", lambda b: b.set_output("y", torch.from_dlpack(b.input("x"))), empty) == b""
    assert await roundtrip(tmp_path, "FP32", lambda b: b.set_output("y", torch.empty(2, 0)), empty) == b""


async def test_the_input_may_be_handed_over_itself(tmp_path):
    for execute in (
        lambda batch: batch.set_output("y", batch.input("x")),
        lambda batch: batch.set_output("y", batch.input("x").numpy()),
        lambda batch: batch.set_output("y", torch.from_dlpack(batch.input("x"))),
    ):
        assert await roundtrip(tmp_path, "INT64", execute) == values("INT64").tobytes()


# -- life --


async def test_views_outlive_their_batch(tmp_path):
    """The memory stays as it was, whatever comes later on the same instance."""
    kept = []

    def execute(batch):
        view = batch.input("x")
        kept.append([view, view.numpy(), torch.from_dlpack(view), memoryview(view), view.__dlpack__()])
        batch.set_output("y", np.zeros(view.shape, np.int64))

    async with serving(tmp_path, execute) as engine:
        for number in range(20):
            await infer(engine, request(x=row(*range(number, number + 50))))
        for number, (view, array, tensor, raw, _) in enumerate(kept):
            expected = np.arange(number, number + 50).reshape(1, 50)
            np.testing.assert_array_equal(array, expected)
            np.testing.assert_array_equal(tensor.numpy(), expected)
            assert bytes(raw) == expected.tobytes()
            np.testing.assert_array_equal(view.numpy(), expected)
        del view, array, tensor, raw, _
        before = live_counters()["blocks"]
        assert before == 20
        for each in kept:
            del each[1:]
        assert live_counters()["blocks"] == before, "one view is enough"
        kept.clear()
        del each
        assert live_counters()["blocks"] == 0


async def test_capsules_that_nobody_consumes_release_their_block(tmp_path):
    def execute(batch):
        view = batch.input("x")
        for _ in range(100):
            view.__dlpack__()
        batch.set_output("y", view.numpy().copy())

    async with serving(tmp_path, execute) as engine:
        await infer(engine, request(x=row(1)))
        assert live_counters()["blocks"] == 0


async def test_references_from_several_threads(tmp_path):
    """One block shared and given back by many threads at once is freed once, after the last."""
    kept = []

    def execute(batch):
        kept.append(batch.input("x"))
        batch.set_output("y", np.zeros(batch.input("x").shape, np.int64))

    async with serving(tmp_path, execute) as engine:
        await infer(engine, request(x=row(*range(100))))
    start = threading.Barrier(4)
    wrong = []

    def work(_):
        start.wait()
        for _ in range(2000):
            tensor = torch.from_dlpack(kept[0])
            if tensor[0, 99].item() != 99:  # read through the shared block
                wrong.append(1)

    in_threads(work, range(4))
    assert wrong == []
    assert live_counters()["blocks"] == 1
    np.testing.assert_array_equal(kept.pop().numpy(), np.arange(100).reshape(1, 100))
    assert live_counters()["blocks"] == 0


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_outputs_are_taken_in_place_and_released_once(tmp_path, kind):
    """The array lives until the last of its requests is answered, then goes."""
    gone = []

    def execute(batch):
        array = np.arange(batch.rows, dtype=np.int64).reshape(-1, 1)
        weakref.finalize(array, gone.append, batch.request_count)
        batch.set_output("y", array if kind == "numpy" else torch.from_numpy(array))

    async with serving(tmp_path, execute) as engine:
        answers = await infer_all(engine, *(request(x=row(n)) for n in range(30)))
        assert all(answer.status == Status.OK for answer in answers)
        gc.collect()
        assert sum(gone) == 30


async def test_refused_output_is_released(tmp_path):
    gone = []

    def execute(batch):
        array = np.zeros((batch.rows + 1, 1), np.int64)
        weakref.finalize(array, gone.append, 1)
        batch.set_output("y", array)

    async with serving(tmp_path, execute) as engine:
        assert (await infer(engine, request(x=row(1)))).status == Status.INTERNAL
        gc.collect()
        assert gone == [1]


# -- refusals --

REFUSED = {
    "float for int": ("INT64", lambda: np.zeros((1, 1), np.float64)),
    "other byte order": ("INT64", lambda: np.zeros((1, 1), ">i8")),
    "complex": ("FP64", lambda: np.zeros((1, 1), complex)),
    "structured": ("INT64", lambda: np.zeros((1, 1), "i4,i4")),
    "objects": ("INT64", lambda: np.zeros((1, 1), object)),
    "fortran order": ("INT64", lambda: np.asfortranarray(np.zeros((1, 2, 3), np.int64))),
    "float32 for bfloat16": ("BF16", lambda: np.zeros((1, 1), np.float32)),
    "float16 for bfloat16": ("BF16", lambda: np.zeros((1, 1), np.float16)),
    "bfloat16 for float16": ("FP16", lambda: np.zeros((1, 1), BF16)),
    "tensor of another type": ("INT64", lambda: torch.zeros(1, 1)),
    "tensor with strides": ("FP32", lambda: torch.zeros(1, 4, 4)[:, :, ::2]),
    "tensor with gradient": ("FP32", lambda: torch.zeros(1, 1, requires_grad=True)),
    "17 dimensions": ("INT64", lambda: np.zeros((1,) * 17, np.int64)),
    "nothing": ("INT64", lambda: None),
}


@pytest.mark.parametrize("refused", REFUSED)
async def test_outputs_that_are_refused(tmp_path, refused):
    datatype, make = REFUSED[refused]
    raised = []

    def execute(batch):
        try:
            batch.set_output("y", make())
        except (ValueError, BufferError) as error:
            raised.append(str(error))
        batch.set_output("y", values(datatype, (1, 6)))  # nothing has been spoilt

    array = values(datatype, (1, 6))
    assert await roundtrip(tmp_path, datatype, execute, array) == array.tobytes()
    assert raised


async def test_a_view_of_strings_has_no_dlpack_and_gives_their_bytes(tmp_path):
    seen = []

    def execute(batch):
        view = batch.input("x")
        seen.append((view.datatype, view.shape, view.strings(), view.numpy().tolist()))
        with pytest.raises(BufferError):
            view.__dlpack__()
        batch.set_bytes_output("y", ["é", b"\0"], (1, 2))

    async with serving(tmp_path, execute, m=config("STRING")) as engine:
        answer = await infer(engine, request(x=np.array([[b"a", b""]], dtype=object)))
        assert answer.array().tolist() == [["é".encode(), b"\0"]]
    assert seen == [("BYTES", (1, 2), [b"a", b""], [[b"a", b""]])]


@pytest.mark.parametrize("length", [1 << 31, 5, 2])
async def test_bytes_that_others_have_changed_are_read_no_further_than_they_are(tmp_path, length):
    """What was checked when it came need not be so when it is read: whoever shares the memory may write to it."""

    def execute(batch):
        view = batch.input("x")
        np.frombuffer(view, np.uint8)[:4] = list(length.to_bytes(4, "little"))
        with pytest.raises(ValueError, match="changed while it is read"):
            view.strings()
        batch.set_bytes_output("y", [b""], (1, 1))

    async with serving(tmp_path, execute, m=config("STRING")) as engine:
        assert (await infer(engine, request(x=np.array([[b"abcd"]], dtype=object)))).status == Status.OK


async def test_bytes_view_may_be_handed_over(tmp_path):
    array = np.array([[b"a", b"bc"]], dtype=object)
    async with serving(tmp_path, lambda b: b.set_output("y", b.input("x")), m=config("STRING")) as engine:
        assert (await infer(engine, request(x=array))).array().tolist() == array.tolist()


async def test_views_of_numbers_have_no_strings_and_no_other_device(tmp_path):
    def execute(batch):
        view = batch.input("x")
        with pytest.raises(TypeError, match="no strings"):
            view.strings()
        with pytest.raises(BufferError):
            view.__dlpack__(dl_device=(2, 0))
        with pytest.raises(BufferError):
            view.__dlpack__(copy=True)
        with pytest.raises(TypeError):
            type(view)()
        with pytest.raises(TypeError):
            type(batch)()
        assert view.__dlpack_device__() == (1, 0)
        batch.set_output("y", view)

    async with serving(tmp_path, execute) as engine:
        assert (await infer(engine, request(x=row(1)))).status == Status.OK
