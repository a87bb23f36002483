"""The backends behind the engine: real requests, batches and views."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from inferd._native.memory.resource import live_counters
from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.fake_batch import NUMPY_TYPES
from tests.backends.models import identity_onnx, save_script
from tests.backends.test_onnxruntime import ELEMENTS
from tests.engine.serving import serving_folder

CONFIG_NAMES = {"BYTES": "STRING"}


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x


class Words(torch.nn.Module):
    def forward(self, x: list[str]) -> list[str]:
        return x


class Total(torch.nn.Module):
    """Keeps and returns a sum over all its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 1))

    def forward(self, x: torch.Tensor):
        self.total += x.sum()
        return self.total.expand(x.size(0), 1)


class Looks(torch.nn.Module):
    """Fails where an element is not in its table, after it has written to its input."""

    def forward(self, x: torch.Tensor):
        x *= 2
        return torch.arange(10)[x]


LOOKS = """
import torch

class Looks(torch.nn.Module):
    def forward(self, x):
        x *= 2
        return torch.arange(10)[x]
"""
EAGER = """
parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: '{"disable": true}' } }
"""


def model_config(name, backend, datatype, dims, extra="", delay_us=20_000):
    kind = f"TYPE_{CONFIG_NAMES.get(datatype, datatype)}"
    return f"""
        name: "{name}" backend: "{backend}" max_batch_size: 8
        input {{ name: "x" data_type: {kind} dims: {dims} }}
        output {{ name: "y" data_type: {kind} dims: {dims} }}
        instance_group {{ count: 1 kind: KIND_CPU }}
        dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}
        {extra}
    """


def add_model(repository, name, backend, datatype, dims="[ 2 ]", extra="", **more):
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(model_config(name, backend, datatype, dims, extra, **more))
    return version


def message(model, array, datatype):
    raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=array.shape)
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw]).SerializeToString()


async def infer(engine, model, array, datatype):
    """Status, text and the answer's array."""
    future: Future = Future()
    engine.infer.submit(
        message(model, array, datatype),
        lambda status, details, response: future.set_result((status, details, response)),
    )
    status, details, response = await asyncio.wrap_future(future)
    if status:
        return status, details, None
    answer = pb.ModelInferResponse.FromString(response)
    assert answer.outputs[0].datatype == datatype
    raw = answer.raw_output_contents[0]
    flat = deserialize_bytes_tensor(raw) if datatype == "BYTES" else np.frombuffer(raw, NUMPY_TYPES[datatype])
    return 0, "", flat.reshape(tuple(answer.outputs[0].shape))


def sample(datatype, rows, width=2):
    if datatype == "BYTES":
        words = [f"{i} é {rows}".encode() for i in range(rows * width)]
        return np.array(words, object).reshape(rows, width)
    return np.arange(rows * width).astype(NUMPY_TYPES[datatype]).reshape(rows, width)


@pytest.mark.parametrize("backend", ["identity", "pytorch", "onnxruntime", "openvino"])
async def test_every_datatype_in_batches(tmp_path, backend):
    if backend == "openvino":
        pytest.importorskip("openvino")
        from tests.backends.openvino_models import same
    for datatype in NUMPY_TYPES:
        words = backend == "pytorch" and datatype == "BYTES"
        dims = "[ 1 ]" if words else "[ 2 ]"
        version = add_model(tmp_path, f"m_{datatype}", backend, datatype, dims, delay_us=60_000_000)
        if backend == "pytorch":
            save_script(Words() if words else Identity(), version)
        if backend == "onnxruntime":
            (version / "model.onnx").write_bytes(identity_onnx(ELEMENTS[datatype], ("N", 2)))
        if backend == "openvino":
            same(version, datatype)
    async with serving_folder(tmp_path) as engine:
        for datatype in NUMPY_TYPES:
            width = 1 if backend == "pytorch" and datatype == "BYTES" else 2
            arrays = [sample(datatype, rows, width) for rows in (1, 3, 4)]
            answers = await asyncio.gather(*(infer(engine, f"m_{datatype}", a, datatype) for a in arrays))
            for array, (status, details, answer) in zip(arrays, answers, strict=True):
                assert (status, details) == (0, "")
                assert answer.shape == array.shape
                assert answer.tolist() == array.tolist()
            statistics = engine.model(f"m_{datatype}").statistics()
            assert (statistics.inference_count, statistics.execution_count) == (8, 1)
    assert not any(live_counters().values())


async def test_answers_do_not_change_with_later_calls(tmp_path):
    save_script(Total(), add_model(tmp_path, "total", "pytorch", "FP32", "[ 1 ]"))
    async with serving_folder(tmp_path) as engine:
        one = np.ones((1, 1), np.float32)
        answers = [(await infer(engine, "total", one, "FP32"))[2].item() for _ in range(3)]
    assert answers == [1, 2, 3]


@pytest.mark.parametrize("form", ["torchscript", "module", "openvino"])
async def test_a_request_whose_content_fails_its_batch_fails_alone(tmp_path, form):
    """The neighbours have the responses that they would have alone, and the offender the reason."""
    if form == "openvino":
        pytest.importorskip("openvino")
        from tests.backends.openvino_models import widened
    extra = 'runtime: "model.py"' + EAGER if form == "module" else ""
    backend = "openvino" if form == "openvino" else "pytorch"
    version = add_model(tmp_path, "looks", backend, "INT64", "[ -1 ]", extra, delay_us=60_000_000)
    if form == "torchscript":
        save_script(Looks(), version)
    elif form == "module":
        (version / "model.py").write_text(LOOKS)
    else:
        widened(version)
    numbers = [1, 2, 13, 3, 4, 1, 2, 3]
    async with serving_folder(tmp_path) as engine:
        for _ in range(2):
            asked = (infer(engine, "looks", np.array([[n]]), "INT64") for n in numbers)
            answers = await asyncio.gather(*asked)
            assert [status for status, _, _ in answers] == [13 * (n == 13) for n in numbers]
            assert [a.tolist() for _, _, a in answers if a is not None] == [[[2 * n]] for n in numbers if n != 13]
            assert answers[2][1]
        assert engine.model("looks").statistics().inference_stats.fail.count == 2
    assert not any(live_counters().values())


async def test_a_failed_batch_says_why_and_the_next_one_works(tmp_path):
    version = add_model(tmp_path, "words", "pytorch", "BYTES", "[ 1 ]")
    save_script(Words(), version)
    async with serving_folder(tmp_path) as engine:
        status, details, _ = await infer(engine, "words", np.array([[b"\xff"]], object), "BYTES")
        assert status == 3
        assert "input 'x' has an element that is not UTF-8 text" in details
        assert (await infer(engine, "words", np.array([[b"good"]], object), "BYTES"))[2].tolist() == [[b"good"]]
    assert not any(live_counters().values())


@pytest.mark.parametrize(("delay_us", "row_delay_us"), [(30_000, 0), (10_000, 5_000)])
async def test_identity_takes_its_time(tmp_path, delay_us, row_delay_us):
    """For each batch, and for each of its rows."""
    delays = {"delay_us": delay_us, "row_delay_us": row_delay_us}
    extra = "".join(f'parameters {{ key: "{key}" value {{ string_value: "{us}" }} }}' for key, us in delays.items())
    add_model(tmp_path, "slow", "identity", "FP32", extra=extra)
    async with serving_folder(tmp_path) as engine:
        await infer(engine, "slow", sample("FP32", 4), "FP32")
        statistics = engine.model("slow").statistics()
    assert statistics.inference_stats.compute_infer.ns >= 30_000_000
