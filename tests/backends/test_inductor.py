"""Models compiled by AOTInductor, on a real package: read, checked, run natively, and through PyTorch's loader."""

import json
import logging
import platform
import re
import shutil
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from inferd.backends.api import BackendError, InstanceSpec, ModelSpec, TensorSpec
from inferd.backends.parameters import Parameters
from inferd.backends.pytorch import PyTorchBackend
from inferd.backends.pytorch._shim import AotiError
from inferd.backends.pytorch.call_order import CallOrder
from inferd.backends.pytorch.inductor import InductorModel, load_library
from inferd.backends.pytorch.options import read_options
from inferd.backends.pytorch.package import read_package
from inferd.backends.pytorch.wrapper import mismatch
from tests.backends.compiled import MAX_BATCH, MAX_WIDTH, compile_module, make_sample
from tests.backends.fake_cuda import FakeCuda, FakeGpuBatch
from tests.backends.models import source
from tests.counters import native_counters
from tests.engine.serving import Pending, infer, infer_all, serving_folder
from tests.engine.serving import request as message

__all__ = ["native_counters"]

CONFIG = """
platform: "torch_aoti"
max_batch_size: 8
input [ { name: "image" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [
  { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "turned" data_type: TYPE_FP32 dims: [ 4, -1 ] },
  { name: "same" data_type: TYPE_FP32 dims: [ -1, 4 ] }
]
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { max_queue_delay_microseconds: 5000 }
"""
IMAGE, IDS = TensorSpec("INPUT__0", "FP32", (-1, 4)), TensorSpec("INPUT__1", "INT64", (-1,))
SCORES = TensorSpec("OUTPUT__0", "FP32", (3,))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The package of the sample, and the module that it was made of."""
    return compile_module(tmp_path_factory.mktemp("compiled"), "sample"), make_sample()


@pytest.fixture
def model(tmp_path, compiled):
    """A version folder with the package; returns the repository."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    shutil.copy(compiled[0], tmp_path / "m" / "1" / "model.pt2")
    return tmp_path


def described(path, inputs=(IMAGE, IDS), outputs=(SCORES,), **fields):
    fields.setdefault("max_batch_size", 8)
    return source(path, inputs, outputs, platform="torch_aoti", **fields)


def sample(rows, width=5):
    random = np.random.default_rng(rows * 10 + width)
    return random.random((rows, width, 4), np.float32), random.integers(0, 9, (rows, width))


def scores(module, image, ids):
    with torch.no_grad():
        return module(torch.from_numpy(image), ids=torch.from_numpy(ids))[0].numpy()


def serving(root, config):
    """An engine with one model."""
    if config is not None:
        (root / "m" / "config.pbtxt").write_text(config)
    return serving_folder(root)


# -- what a package says


def test_a_package_describes_itself(compiled):
    package = read_package(compiled[0])
    assert (package.device, package.obstacle) == ("cpu", "")
    assert package.arguments == ("ARGS[0]", "KWARGS[ids]")
    assert package.results == ("RESULT[0]", "RESULT[1]", "RESULT[2]")
    assert [each.datatype for each in package.inputs] == ["FP32", "INT64"]
    batch, width, last = package.inputs[0].dims
    assert (batch.lowest, batch.highest) == (1, MAX_BATCH)
    assert width.highest == MAX_WIDTH
    assert (last.lowest, last.highest) == (4, 4)
    assert package.inputs[1].dims == (batch, width)


def test_names_types_and_shapes_are_completed(model):
    signature = PyTorchBackend().inspect(described(model / "m" / "1"))
    assert signature.batches
    assert signature.inputs == (IMAGE, IDS)
    assert signature.outputs == (
        SCORES,
        TensorSpec("OUTPUT__1", "FP32", (4, -1)),
        TensorSpec("OUTPUT__2", "FP32", (-1, 4)),
    )


def repacked(package, target, change):
    """Copy the package: `change` gets each file's name and content, and returns the pairs to write in its place."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            for each in change(name, old.read(name)):
                new.writestr(*each)
    return target


def metadata(**values):
    def change(name, content):
        if name.endswith("wrapper_metadata.json"):
            content = json.dumps({**json.loads(content), **values})
        return [(name, content)]

    return change


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"AOTI_MACHINE": "riscv64"}, f"was compiled for riscv64, this machine is {platform.machine()}"),
        ({"AOTI_CPU_ISA": "AVX2 AMX_FP16"}, "this one lacks .*AMX_FP16"),
    ],
)
def test_a_package_for_another_machine_is_refused(compiled, tmp_path, monkeypatch, values, text):
    monkeypatch.setattr("inferd.backends.pytorch.package._cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(BackendError, match=text):
        read_package(repacked(compiled[0], tmp_path / "model.pt2", metadata(**values)))


KERNEL = """
extern "C" void embed(const int64_t* ids)
{
    #pragma omp parallel num_threads(2)
    {
        AOTI_TORCH_CHECK((0 <= ids[0]) & (ids[0] < 10L), "index out of bounds");
    }
}
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_package_in_which_an_index_can_end_the_server_is_refused(compiled, tmp_path, threads):
    """Guards the server: an error cannot leave a parallel region, so the process would abort for one client's bytes."""
    path = shutil.copy(compiled[0], tmp_path / "model.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        kernel = KERNEL if threads == 2 else KERNEL.replace("#pragma omp parallel num_threads(2)", "")
        archive.writestr(f"{read_package(path).folder}/kernel.cpp", kernel)
    if threads == 2:
        with pytest.raises(BackendError, match="index out of range would end the server"):
            PyTorchBackend().load(described(tmp_path))
    PyTorchBackend().load(described(tmp_path, parameters={"ALLOW_FATAL_CHECKS": str(threads == 2).lower()})).close()


CPU = '{"AOTI_DEVICE_KEY": "cpu"}'


def test_what_is_no_package_is_refused(tmp_path):
    with pytest.raises(BackendError, match=r"unable to find '.*model\.pt2' for model 'm'"):
        PyTorchBackend().load(described(tmp_path))
    (tmp_path / "model.pt2").write_bytes(b"something else")
    with pytest.raises(BackendError, match="is no package of AOTInductor"):
        PyTorchBackend().load(described(tmp_path))
    folder = "m/data/aotinductor/model/a"
    for metadata, code in (("[]", ""), ("1", ""), (CPU, "([1])"), (CPU, "([1, 5])"), ("damaged", "")):
        with zipfile.ZipFile(tmp_path / "model.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{folder}_metadata.json", metadata)
            archive.writestr(f"{folder}.so", "")
            archive.writestr(f"{folder}.cpp", f'in_spec_ = R"{code}";')
        if metadata == "damaged":
            whole = (tmp_path / "model.pt2").read_bytes()
            (tmp_path / "model.pt2").write_bytes(whole.replace(b"_metadata.json", b"_metadata.json\xff\xff", 1))
        with pytest.raises(BackendError, match="is no package of AOTInductor"):
            PyTorchBackend().load(described(tmp_path))
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        archive.writestr("model/version", "1")
    with pytest.raises(BackendError, match="holds 0 models of AOTInductor"):
        PyTorchBackend().load(described(tmp_path))
    with zipfile.ZipFile(tmp_path / "model.pt2", "a") as archive:
        archive.writestr("model/models/model.json", "{}")
    with pytest.raises(BackendError, match=r"torch\.export\.save makes, a program that is not compiled: give"):
        PyTorchBackend().load(described(tmp_path))


# -- a configuration against it


@pytest.mark.parametrize("described_inputs", [True, False])
def test_constants_among_the_arguments_are_no_inputs(compiled, described_inputs):
    """Guards names of arguments beside a number that is in the code: inputs are found by name, in any order."""
    package = replace(read_package(compiled[0]), arguments=("ARGS[0]", "ARGS[1]", "KWARGS[ids]"))
    package = replace(package, numbers=(5, 7)) if described_inputs else replace(package, inputs=None, numbers=())
    inputs = (replace(IDS, name="KWARGS[ids]"), replace(IMAGE, name="ARGS[0]"))
    order = CallOrder(ModelSpec("m", inputs=inputs, outputs=(SCORES,), max_batch_size=8, backend="pytorch"), package)
    assert order.input_indexes() == [1, 0]


@pytest.mark.long
def test_a_constant_that_is_configured_as_an_input_is_refused(tmp_path):
    """Guards a model that would compute with one argument in the place of another, of the same datatype and shape."""
    package = read_package(compile_module(tmp_path, "scaled"))

    def order_of(*names):
        inputs = tuple(TensorSpec(name, "FP32", (2, 3)) for name in names)
        return CallOrder(ModelSpec("m", inputs=inputs, outputs=(SCORES,), backend="pytorch"), package)

    assert order_of("ARGS[2]", "ARGS[0]").input_indexes() == [1, 0]
    assert order_of("INPUT__0", "INPUT__1").input_indexes() == [0, 1]
    for wrong in (("ARGS[0]", "ARGS[1]"), ("ARGS[2]", "ARGS[1]")):
        with pytest.raises(BackendError, match="one of these arguments is a constant"):
            order_of(*wrong)
    with pytest.raises(BackendError, match=r"model provides 2, among its arguments .*, some of which are constants"):
        order_of("ARGS[0]")


def test_an_input_of_too_many_dimensions_is_refused(compiled, tmp_path):
    """Guards the memory of the process: nothing is written beyond the room for dimensions."""

    class Deep:
        pointer, datatype, shape = 0, "FP32", (1,) * 40

    library = load_library(read_package(compiled[0]).unpack(tmp_path), "cpu", 1)
    with pytest.raises(AotiError, match="no input 0 of FP32 with 40 dimensions"):
        library.run([Deep(), Deep()])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": [IMAGE]}, r"expects 1 inputs, model provides 2, among its arguments ARGS\[0\], KWARGS\[ids\]$"),
        (
            {"inputs": [IMAGE, TensorSpec("INPUT__1", "INT32", (-1,))]},
            "unexpected datatype INT32 for input 'INPUT__1', expecting INT64",
        ),
        (
            {"inputs": [TensorSpec("INPUT__0", "FP32", (-1, 5)), IDS]},
            r"'INPUT__0': the model expects shape \[-1,-1,4\] but the model configuration specifies shape \[-1,-1,5\]",
        ),
        ({"inputs": [TensorSpec("INPUT__0", "FP32", (4,)), IDS]}, r"the model expects 3 dimensions .*specifies 2"),
        ({"max_batch_size": MAX_BATCH + 1}, "its first dimension takes 1 to 16, and must take 1 to 17"),
        ({"inputs": [IMAGE, TensorSpec("INPUT__1", "INT64", (-1,), optional=True)]}, "'INPUT__1' is optional"),
        ({"inputs": [IMAGE, TensorSpec("INPUT__1", "BYTES", (-1,))]}, "'INPUT__1' is BYTES"),
        ({"outputs": [TensorSpec(f"OUTPUT__{i}", "FP32", (3,)) for i in range(4)]}, "the model returns 3: RESULT"),
        ({"outputs": []}, "at least one output"),
    ],
)
def test_contradictions_are_refused(model, change, text):
    with pytest.raises(BackendError, match=text):
        PyTorchBackend().load(described(model / "m" / "1", **change))


def test_a_device_that_it_was_not_compiled_for_is_refused(model):
    loaded = PyTorchBackend().load(described(model / "m" / "1"))
    with pytest.raises(BackendError, match=r"is of KIND_GPU, but .* was compiled for cpu: write kind: KIND_CPU"):
        loaded.create_instance(InstanceSpec("m_0", kind="GPU"))
    loaded.close()


# -- running


@pytest.mark.usefixtures("native_counters")
async def test_requests_are_batched(model, compiled):
    patient = CONFIG.replace("max_queue_delay_microseconds: 5000", "max_queue_delay_microseconds: 30000000")
    async with serving(model, patient) as engine:
        for rows in ((8,), (1, 3, 4)):  # each fills a batch
            sent = [sample(each) for each in rows]
            answers = await infer_all(engine, *(message(image=image, ids=ids) for image, ids in sent))
            for (image, ids), answer in zip(sent, answers, strict=True):
                assert (answer.status, answer.text) == (0, "")
                np.testing.assert_allclose(answer.array("scores"), scores(compiled[1], image, ids), rtol=1e-5)
                np.testing.assert_array_equal(answer.array("turned"), image.transpose(0, 2, 1))
                np.testing.assert_array_equal(answer.array("same"), image)
        statistics = engine.model("m").statistics()
    assert (statistics.inference_count, statistics.execution_count) == (16, 2)
    assert statistics.inference_stats.compute_infer.ns > 0


@pytest.mark.usefixtures("native_counters")
async def test_a_model_without_a_configuration_is_served(model, compiled):
    async with serving(model, None) as engine:
        image, ids = sample(2)
        answer = await infer(engine, message(INPUT__0=image, INPUT__1=ids, outputs=("OUTPUT__0",)))
        np.testing.assert_allclose(answer.array("OUTPUT__0"), scores(compiled[1], image, ids), rtol=1e-5)
        config = engine.model("m").config
    assert (config.platform, config.backend, config.max_batch_size) == ("torch_aoti", "pytorch", 4)


async def test_tensors_named_by_their_place_in_the_call(model, compiled):
    names = {
        "image": "ARGS[0]",
        "ids": "KWARGS[ids]",
        "scores": "RESULT[0]",
        "turned": "RESULT[1]",
        "same": "RESULT[2]",
    }
    config = CONFIG
    for old, new in names.items():
        config = config.replace(f'name: "{old}"', f'name: "{new}"')
    first, second = config.index('{ name: "ARGS'), config.index('{ name: "KWARGS')
    close = config.index(" ]\noutput")
    config = f"{config[:first]}{config[second:close]}, {config[first:second].rstrip(', ')}{config[close:]}"
    async with serving(model, config) as engine:
        image, ids = sample(2)
        answer = await infer(engine, message(**{"ARGS[0]": image, "KWARGS[ids]": ids}))
        np.testing.assert_allclose(answer.array("RESULT[0]"), scores(compiled[1], image, ids), rtol=1e-5)


@pytest.mark.usefixtures("native_counters")
@pytest.mark.parametrize(
    ("image_width", "ids_width", "text"),
    [
        (
            MAX_WIDTH + 1,
            MAX_WIDTH + 1,
            f"input 'image' for model 'm': dimension 1 is 9, the compiled model takes .*{MAX_WIDTH}",
        ),
        (5, 4, "input 'ids' for model 'm': dimension 1 is 4, the compiled model takes 5"),
    ],
)
async def test_a_wrong_shape_is_refused_by_name_and_harms_nobody(model, image_width, ids_width, text):
    async with serving(model, CONFIG) as engine:
        good = sample(1)
        wrong = Pending(engine, message(image=sample(1, image_width)[0], ids=sample(1, ids_width)[1]))
        right = Pending(engine, message(image=good[0], ids=good[1]))
        answer = await wrong.answer()
        assert answer.status == 3
        assert re.search(text, answer.text), answer.text
        assert (await right.answer()).status == 0


@pytest.mark.usefixtures("native_counters")
async def test_the_native_check_agrees_with_its_model(model, compiled):
    """Which widths of both inputs go together, against `wrapper.mismatch`."""
    expected = read_package(compiled[0]).inputs
    async with serving(model, CONFIG) as engine:
        for width in range(1, MAX_WIDTH + 3):
            for ids_width in range(1, MAX_WIDTH + 3):
                image, ids = sample(1, width)[0], sample(1, ids_width)[1]
                answer = await infer(engine, message(image=image, ids=ids))
                wrong = mismatch(expected, (image.shape, ids.shape))
                assert answer.status == (3 if wrong else 0), (width, ids_width, wrong, answer.text)


@pytest.mark.usefixtures("native_counters")
async def test_an_output_of_another_type_fails_the_batch(model):
    config = CONFIG.replace('name: "scores" data_type: TYPE_FP32', 'name: "scores" data_type: TYPE_FP64')
    async with serving(model, config) as engine:
        image, ids = sample(1)
        answer = await infer(engine, message(image=image, ids=ids))
    assert answer.status == 13
    assert "output 'scores' is configured as FP64, the model returned FP32 with 2 dimensions" in answer.text


@pytest.mark.usefixtures("native_counters")
@pytest.mark.parametrize(("shares", "copies"), [("true", [3]), ("false", [1, 1, 1])])
async def test_instances_share_weights_if_asked(model, compiled, monkeypatch, shares, copies):
    loaded = []

    def load(path, device, count):
        loaded.append(count)
        return load_library(path, device, count)

    monkeypatch.setattr("inferd.backends.pytorch.inductor.load_library", load)
    parameter = f'parameters {{ key: "ENABLE_WEIGHT_SHARING" value {{ string_value: "{shares}" }} }}'
    async with serving(model, CONFIG.replace("count: 1", "count: 3") + parameter) as engine:
        sent = [sample(1 + number % 3) for number in range(30)]
        answers = await infer_all(engine, *(message(image=image, ids=ids) for image, ids in sent))
    assert loaded == copies
    for (image, ids), answer in zip(sent, answers, strict=True):
        np.testing.assert_allclose(answer.array("scores"), scores(compiled[1], image, ids), rtol=1e-5)


# -- through PyTorch's loader


def beside(name, content):
    """Weights beside the library, as far as one can see."""
    more = [("model/data/weights/readme", b"")] if name.endswith(".so") else []
    return [(name, content), *more]


@pytest.mark.usefixtures("native_counters")
@pytest.mark.parametrize("why", ["obstacle", "library"])
async def test_what_the_library_alone_cannot_do_the_loader_does(model, compiled, monkeypatch, caplog, why):
    if why == "obstacle":
        repacked(compiled[0], model / "m" / "1" / "model.pt2", beside)
        text = "its weights lie beside its library"
    else:
        text = "no such function"

        def missing(*_):
            raise AotiError(text)

        monkeypatch.setattr("inferd.backends.pytorch.inductor.load_library", missing)
    with caplog.at_level(logging.WARNING, "inferd.backends"):
        async with serving(model, CONFIG) as engine:
            image, ids = sample(2)
            answer = await infer(engine, message(image=image, ids=ids))
            refused = await infer(engine, message(image=sample(1, 5)[0], ids=sample(1, 4)[1]))
    np.testing.assert_allclose(answer.array("scores"), scores(compiled[1], image, ids), rtol=1e-5)
    np.testing.assert_array_equal(answer.array("turned"), image.transpose(0, 2, 1))
    np.testing.assert_array_equal(answer.array("same"), image)
    assert refused.status == 3
    assert "dimension 1 of input 1 is 4, the compiled model takes 5 there" in refused.text
    assert any("goes through PyTorch's loader" in each.message and text in each.message for each in caplog.records)


# -- on a GPU, as far as it can be seen without one


class FakeLibrary:
    """Answers with its first input."""

    input_count, output_count = 2, 3

    def __init__(self):
        self.calls = []

    def run(self, values, stream, single):
        self.calls.append((stream, single))
        return [values[0], values[0].transpose(1, 2), values[0]]


@pytest.fixture(params=["90", ""])
def on_gpu(model, compiled, monkeypatch, request):
    """An instance on a GPU, with a library that is none."""
    FakeCuda(monkeypatch)
    library = FakeLibrary()
    monkeypatch.setattr("inferd.backends.pytorch.inductor.load_library", lambda *_: library)
    package = replace(read_package(compiled[0]), device="cuda", capability=request.param)
    turned = TensorSpec("RESULT[1]", "FP32", (4, -1))
    options = read_options(Parameters({}, "model 'm'"))
    loaded = InductorModel(described(model / "m" / "1", outputs=(turned,)), options, package)
    yield loaded.create_instance(InstanceSpec("m_0", kind="GPU")), library
    loaded.close()


def gpu_batch(width=5, ids=5, capturing=False):
    inputs = {"INPUT__0": torch.ones(2, width, 4), "INPUT__1": torch.ones(2, ids, dtype=torch.int64)}
    return FakeGpuBatch(inputs, {"RESULT[1]"}, capturing)


def test_a_compiled_model_runs_on_the_stream_of_its_instance(on_gpu):
    instance, library = on_gpu
    for capturing in (False, True):
        batch = gpu_batch(capturing=capturing)
        instance.submit(batch)
        assert batch.outputs["RESULT[1]"].shape == (2, 4, 5)
        assert batch.outputs["RESULT[1]"].is_contiguous()
    assert library.calls == [(100, False), (100, True)]


def test_a_wrong_shape_does_not_reach_the_library_on_a_gpu(on_gpu):
    instance, library = on_gpu
    with pytest.raises(BackendError, match=r"dimension 1 of input 1 is 4, .*takes 5 .*1 is 'INPUT__1'"):
        instance.submit(gpu_batch(ids=4))
    assert not library.calls


def test_a_package_for_another_gpu_is_refused(model, compiled, monkeypatch):
    FakeCuda(monkeypatch)
    package = replace(read_package(compiled[0]), device="cuda", capability="80")
    loaded = InductorModel(described(model / "m" / "1"), read_options(Parameters({}, "model 'm'")), package)
    with pytest.raises(BackendError, match="compiled for compute capability 80, device 0 has 90"):
        loaded.create_instance(InstanceSpec("m_0", kind="GPU"))
    loaded.close()
