"""The TensorFlow backend: what is read without TensorFlow, and models in workers that have it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from inferd.backends.api import AcceleratorSpec, BackendError, InstanceSpec, TensorSpec
from inferd.backends.loader import BackendLoader
from inferd.backends.tensorflow import TensorFlowBackend
from inferd.backends.tensorflow.saved_model import DATATYPES, _SavedModel
from tests.backends.models import refusal, source
from tests.engine.serving import infer, request, serving_folder

ROOT = Path(__file__).resolve().parents[2]
OF_MAKE = ROOT / "build" / "tensorflow"  # made by `make setup WITH=tensorflow`
NUMBERS = {name: number for number, name in DATATYPES.items()}


def environment() -> str:
    """The environment that has TensorFlow; "" where there is none."""
    return str(OF_MAKE) if (OF_MAKE / "bin" / "python").exists() else ""


needs_tensorflow = pytest.mark.skipif(not environment(), reason="no TensorFlow: make setup WITH=tensorflow")

# -- read without TensorFlow


def saved(folder, tags=("serve",), **signatures):
    """Write a SavedModel of signatures: name=(inputs, outputs), each {name: (datatype, dims or None)}."""
    model = _SavedModel()
    graph = model.meta_graphs.add()
    graph.meta_info_def.tags.extend(tags)
    for name, (inputs, outputs) in signatures.items():
        entry = graph.signature_def.add(key=name)
        for entries, tensors in ((entry.value.inputs, inputs), (entry.value.outputs, outputs)):
            for tensor, (datatype, dims) in tensors.items():
                info = entries.add(key=tensor).value
                info.dtype = NUMBERS.get(datatype, 8)
                info.shape.unknown_rank = dims is None
                for dim in dims or ():
                    info.shape.dim.add(size=dim)
    path = folder / "model.savedmodel"
    path.mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(model.SerializeToString())
    return folder


PLAIN = ({"x": ("FP32", (-1, 2))}, {"y": ("FP32", (-1, 2))})
X, Y = ("x", "FP32", (2,)), ("y", "FP32", (2,))


@pytest.fixture
def backend():
    return TensorFlowBackend({})


@pytest.mark.parametrize(
    ("shape", "batches", "dims"),
    [((-1, 3, -1), True, (3, -1)), ((-1,), True, ()), ((4, 3), False, (4, 3)), ((), False, (1,))],
)
def test_a_signature_batches_when_its_first_dimension_is_free(backend, tmp_path, shape, batches, dims):
    saved(tmp_path, serving_default=({"x": ("INT64", shape)}, {"y": ("BYTES", shape)}))
    signature = backend.inspect(source(tmp_path))
    assert signature.batches is batches
    assert signature.inputs == (TensorSpec("x", "INT64", dims),)
    assert signature.outputs == (TensorSpec("y", "BYTES", dims),)


def test_the_signature_and_the_graph_that_are_meant(backend, tmp_path):
    other = ({"a": ("FP32", (-1, 2))}, {"b": ("FP32", (-1, 2))})
    saved(tmp_path, ("train", "gpu"), serving_default=PLAIN, other=other, __saved_model_init_op=({}, {}))
    named = {"TF_GRAPH_TAG": "gpu", "TF_SIGNATURE_DEF": "other"}
    assert [tensor.name for tensor in backend.inspect(source(tmp_path, parameters=named)).inputs] == ["a"]
    for parameters, text in (
        ({}, "has no graph with tag 'serve' (those of its graphs are train,gpu)"),
        ({**named, "TF_SIGNATURE_DEF": "none"}, "has no signature 'none' (it has serving_default, other)"),
    ):
        with pytest.raises(BackendError) as caught:
            backend.inspect(source(tmp_path, parameters=parameters))
        assert text in str(caught.value)


def test_the_only_signature_needs_no_name(backend, tmp_path):
    saved(tmp_path, predict=PLAIN, __saved_model_init_op=({}, {}))
    assert [tensor.name for tensor in backend.inspect(source(tmp_path)).inputs] == ["x"]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [(("COMPLEX", (-1,)), "unsupported datatype 8 of 'x'"), (("FP32", None), "how many dimensions 'x' has: configure")],
)
def test_what_cannot_be_described(backend, tmp_path, tensor, text):
    saved(tmp_path, serving_default=({"x": tensor}, {"y": ("FP32", (-1, 2))}))
    with pytest.raises(BackendError, match=text):
        backend.inspect(source(tmp_path))


def test_what_is_no_saved_model(backend, tmp_path):
    with pytest.raises(BackendError, match=r"unable to find '.*model\.savedmodel' for model 'm'"):
        backend.inspect(source(tmp_path))
    (tmp_path / "model.savedmodel").mkdir()
    with pytest.raises(BackendError, match=r"'.*model\.savedmodel' is no SavedModel"):
        backend.inspect(source(tmp_path))
    (tmp_path / "model.savedmodel" / "saved_model.pb").write_bytes(b"\xff" * 9)
    with pytest.raises(BackendError, match="failed to load 'm' from"):
        backend.inspect(source(tmp_path))


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "text"),
    [
        ([("a", "FP32", (2,))], [Y], 8, "unexpected inference input 'a' for model 'm', allowed inputs are: x"),
        ([], [Y], 8, "configuration expects 0 inputs, model provides 1: add x"),
        ([X], [("b", "FP32", (2,))], 8, "unexpected inference output 'b'"),
        ([("x", "INT32", (2,))], [Y], 8, "expects datatype INT32 for input 'x', model provides FP32"),
        ([("x", "FP32", (3,))], [Y], 8, "the model expects shape [-1,2]"),
        ([X], [Y], 0, "the model expects 2 dimensions"),
        ([TensorSpec("x", "FP32", (2,), optional=True)], [Y], 8, "input 'x' must not be optional"),
    ],
)
def test_a_configuration_that_contradicts_the_file(backend, tmp_path, inputs, outputs, rows, text):
    saved(tmp_path, serving_default=PLAIN)
    assert text in refusal(backend, source(tmp_path, inputs, outputs, max_batch_size=rows))


@pytest.mark.parametrize(
    ("parameters", "fields", "text"),
    [
        ({"TF_NUM_INTRA_THREADS": "-1"}, {}, "parameter 'TF_NUM_INTRA_THREADS' is '-1', expected at least 0"),
        ({"MAX_SESSION_SHARE_COUNT": "0"}, {}, "expected at least 1"),
        ({"TF_INIT_OPS_FILE": "none.json"}, {}, "expected a JSON file like"),
        ({"TF_INIT_OPS_FILE": "../../x"}, {}, "must stay within the model directory"),
        ({"EXECUTION_MODE": "in-process"}, {}, "expected process: models of backend 'test' have worker processes"),
        ({}, {"graph_level": 7}, "optimization.graph.level is 7, expected -1, 0, 1 or 2"),
        (
            {},
            {"gpu_accelerators": (AcceleratorSpec("tensorrt"),), "instances": (InstanceSpec("m_0", "GPU"),)},
            "execution accelerator 'tensorrt' is not served: TensorFlow has no TF-TRT since 2.18",
        ),
    ],
)
def test_a_wrong_parameter_is_named(backend, tmp_path, parameters, fields, text):
    saved(tmp_path, serving_default=PLAIN)
    assert text in refusal(backend, source(tmp_path, [X], [Y], parameters, max_batch_size=8, **fields))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"version": "1"}, "parameter 'version' is '1', expected 2"),
        ({"gpu-memory-fraction": "2"}, "expected a number from 0 to 1"),
        ({"allow-soft-placement": "maybe"}, "expected true or false"),
        ({"environment": "/nowhere"}, "--backend-config environment: there is no environment '/nowhere'"),
        ({"environment": "nowhere"}, f"there is no environment '{Path.cwd()}/nowhere'"),
    ],
)
def test_a_wrong_option_of_the_backend_is_named(tmp_path, config, text):
    saved(tmp_path, serving_default=PLAIN)
    assert text in refusal(TensorFlowBackend(config), source(tmp_path, [X], [Y], max_batch_size=8))


def test_a_missing_framework_is_named_with_the_ways_to_it(backend, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    saved(tmp_path, serving_default=PLAIN)
    described = source(tmp_path, [X], [Y], max_batch_size=8, backend="tensorflow")
    assert refusal(backend, described) == (
        f"model 'm' needs tensorflow, which {sys.executable} does not find: {sys.executable} -m pip install "
        "tensorflow, or name an environment that has it, by --backend-config tensorflow,environment=... for all "
        "models or by the parameter EXECUTION_ENV_PATH for one"
    )
    with pytest.raises(BackendError, match="needs tensorflow"):
        backend.check(described)


def test_a_graph_def_must_be_described(backend, tmp_path):
    (tmp_path / "model.graphdef").write_bytes(b"")
    described = source(tmp_path, [], [], platform="tensorflow_graphdef")
    assert backend.inspect(described) is None
    assert "must contain at least one input; a GraphDef does not describe its inputs" in refusal(backend, described)


# -- served


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the models of tensorflow_models."""
    folder = tmp_path_factory.mktemp("tensorflow")
    program = Path(__file__).parent / "tensorflow_models.py"
    python = Path(environment()) / "bin" / "python"
    done = subprocess.run([python, program, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def add_model(repository, made, name, config="", instances=1):
    """A model of `made`, which lies under its name in the repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    if (made / f"{name}.graphdef").exists():
        shutil.copy(made / f"{name}.graphdef", version / "model.graphdef")
    else:
        shutil.copytree(made / name, version / "model.savedmodel")
    group = f"instance_group {{ kind: KIND_CPU count: {instances} }}"
    (repository / name / "config.pbtxt").write_text(f"{group}\n{config}")
    return version


def serving(repository, problems=0):
    return serving_folder(repository, BackendLoader({"tensorflow": {"environment": environment()}}), problems)


async def ask(engine, model, **inputs):
    return await infer(engine, request(model, **inputs))


@needs_tensorflow
async def test_a_model_is_completed_and_served_in_batches_also_after_its_worker_died(tmp_path, made):
    add_model(tmp_path, made, "linear", "dynamic_batching { max_queue_delay_microseconds: 60000000 }")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with serving(tmp_path) as engine:
        config = engine.model("linear").config
        assert (config.platform, config.max_batch_size) == ("tensorflow_savedmodel", 4)

        async def ask_both(first=1.0):
            rows = [np.array(each, np.float32) for each in ([[first, 2]], [[3, 4], [5, 6], [7, 8]])]
            answers = await asyncio.gather(*(ask(engine, "linear", x=each) for each in rows))
            if any(answer.text for answer in answers):
                return False
            for given, answer in zip(rows, answers, strict=True):
                assert answer.array("y").tolist() == (given * 2 + 1).tolist()
            return True

        assert await ask_both()
        assert engine.model("linear").statistics().execution_count == 1
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        max(started, key=lambda child: child.memory_info().rss).kill()  # not its supervisor
        for _ in range(100):
            if await ask_both():
                break
        assert await ask_both()


@needs_tensorflow
async def test_every_datatype_reaches_the_model_and_comes_back(tmp_path, made):
    add_model(tmp_path, made, "reversed")
    whole = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    arrays = {kind: np.array([[0, 1]], kind) for kind in ("bool", *whole, "float16", "float32", "float64")}
    arrays["string"] = np.array([["é\0".encode(), b""]], object)
    bits = np.array([[0, 0x3F80]], np.uint16)
    message = request("reversed", **{f"x_{kind}": array for kind, array in arrays.items()})
    message.inputs.add(name="x_bfloat16", datatype="BF16", shape=[1, 2])
    message.raw_input_contents.append(bits.tobytes())
    async with serving(tmp_path) as engine:
        answer = await infer(engine, message)
    assert answer.text == ""
    for kind, array in arrays.items():
        assert answer.array(f"y_{kind}").tolist() == array[:, ::-1].tolist(), kind
    index = [output.name for output in answer.response.outputs].index("y_bfloat16")
    assert answer.response.raw_output_contents[index] == bits[:, ::-1].tobytes()


@needs_tensorflow
async def test_ragged_requests_are_executed_together(tmp_path, made):
    config = """
        platform: "tensorflow_savedmodel" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        batch_input {
            kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "x"
        }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } }
        dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 60000000 }
    """
    add_model(tmp_path, made, "sums", config)
    async with serving(tmp_path) as engine:
        rows = [np.arange(1, n + 1, dtype=np.float32)[None] for n in (3, 1, 4)]
        answers = await asyncio.gather(*(ask(engine, "sums", x=each) for each in rows))
        assert [(each.text, each.array("y").tolist()) for each in answers] == [("", [[6]]), ("", [[1]]), ("", [[10]])]
        assert engine.model("sums").statistics().execution_count == 1


@pytest.mark.long
@needs_tensorflow
async def test_a_graph_def_and_what_initialises_it(tmp_path, made):
    config = """
        max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
        parameters { key: "TF_INIT_OPS_FILE" value { string_value: "init_ops.json" } }
    """
    version = add_model(tmp_path, made, "graph", config)
    (version.parent / "init_ops.json").write_text('{"init_ops": ["init"]}')
    async with serving(tmp_path) as engine:
        assert engine.model("graph").config.platform == "tensorflow_graphdef"
        assert (await ask(engine, "graph", x=np.zeros((1, 2), np.float32))).array("y").tolist() == [[5, 5]]


@pytest.mark.long
@needs_tensorflow
async def test_settings(tmp_path, caplog, made):
    """Guards that a model with all of them is served, and that on a CPU mixed precision is a hint."""
    config = """
        optimization {
            graph { level: 1 }
            execution_accelerators { gpu_execution_accelerator { name: "auto_mixed_precision" } }
        }
        parameters { key: "TF_NUM_INTRA_THREADS" value { string_value: "1" } }
        parameters { key: "TF_NUM_INTER_THREADS" value { string_value: "1" } }
        parameters { key: "TF_SIGNATURE_DEF" value { string_value: "squared" } }
    """
    add_model(tmp_path, made, "linear", config)
    async with serving(tmp_path) as engine:
        answer = await ask(engine, "linear", x=np.array([[3, 4]], np.float32))
        assert answer.array("y").tolist() == [[9, 16]]
    assert "gpu_execution_accelerator of model 'linear' has no effect" in caplog.text


@needs_tensorflow
async def test_an_error_of_the_graph_fails_its_batch_alone(tmp_path, made):
    add_model(tmp_path, made, "broken", instances=2)
    async with serving(tmp_path) as engine:
        failed = await ask(engine, "broken", x=np.array([[np.nan, 0]], np.float32))
        assert "not a number" in failed.text
        for _ in range(4):
            assert (await ask(engine, "broken", x=np.array([[1, 2]], np.float32))).array("y").tolist() == [[1, 2]]


@pytest.mark.long
@needs_tensorflow
async def test_a_damaged_graph_is_told_and_the_server_stays(tmp_path, made):
    version = add_model(tmp_path, made, "linear")
    for file in (version / "model.savedmodel" / "variables").glob("*.index"):
        file.write_bytes(b"nothing")
    add_model(tmp_path, made, "fixed")
    async with serving(tmp_path, problems=1) as engine:
        assert "linear" in str(engine.problems)
        answer = await ask(engine, "fixed", x=np.zeros((2, 2), np.float32), one=np.array([6], np.float32))
        assert (answer.array("y").tolist(), answer.array("two").tolist()) == ([[1, 1], [1, 1]], [7])
