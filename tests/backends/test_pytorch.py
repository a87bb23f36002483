"""The PyTorch backend, on scripted modules of a line or two."""

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from inferd.backends.api import BackendError, InstanceSpec, RequestError, TensorSpec
from inferd.backends.pytorch import PyTorchBackend
from tests.backends.fake_batch import NUMPY_TYPES, FakeBatch
from tests.backends.models import instance, save_script, source
from tests.threads import leaves_turns

# TorchScript reads the source of these classes, so they stand in a file and their annotations are real types.


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x


class Subtract(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor):
        return left - right


class SumAndDifference(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor):
        return x + y, x - y


class Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x * 2]


class Dictionary(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]):
        return tensors["a"] - tensors["b"] if "b" in tensors else tensors["a"]


class TwoDictionaries(torch.nn.Module):
    def forward(self, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
        return a["x"]


class DictionaryAndTensor(torch.nn.Module):
    def forward(self, a: dict[str, torch.Tensor], b: torch.Tensor):
        return a["x"] + b


class DictionaryOfText(torch.nn.Module):
    def forward(self, a: dict[str, str]):
        return torch.zeros(1)


class Shout(torch.nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return [word + "!" for word in words]


class WordsAndLengths(torch.nn.Module):
    def forward(self, words: list[str]) -> tuple[list[str], torch.Tensor]:
        return words, torch.tensor([len(word) for word in words])


class Anything(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return "text"


class OptionalArgument(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, shift: float = 1.0):
        return x * scale if scale is not None else x + shift


class TensorAfterDefault(torch.nn.Module):
    def forward(self, x: torch.Tensor, shift: float = 1.0, y: torch.Tensor | None = None):
        return x + shift + (y if y is not None else torch.zeros(1))


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, 1))

    def forward(self, x: torch.Tensor):
        self.count += 1
        return self.count


class Remembers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(1, 1)

    def forward(self, x: torch.Tensor):
        self.last = self.last + x
        return self.last


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor):
        return self.weight


class Transpose(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x.transpose(1, 2)


class Grad(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor):
        y = x * self.weight
        return torch.tensor([[y.requires_grad, y.is_inference()]])


class Busy(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        for _ in range(12):
            x = x @ x
        return x


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return torch.nn.functional.dropout(x, 0.5, self.training)


@pytest.fixture
def backend():
    return PyTorchBackend({})


def run(backend, path, inputs, outputs, arrays, wanted=None, rows=0, parameters=None):
    """Load, run one batch with arrays by name, and return the batch."""
    described = source(path, inputs, outputs, parameters, max_batch_size=8 if rows else 0)
    batch = FakeBatch(arrays, {name: datatype for name, datatype, _ in outputs}, wanted, rows)
    instance(backend, described).execute(batch)
    return batch


def floats(*values):
    return np.array([values], np.float32)


F = "FP32"
OUT = [("OUTPUT__0", F, (-1,))]


# -- which tensor is which


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("INPUT__0", "INPUT__1", 3),
        ("INPUT__1", "INPUT__0", -3),
        ("left", "right", 3),
        ("right", "left", -3),
        ("one", "other", 3),
    ],
)
def test_inputs_are_passed_by_index_by_argument_or_by_order(backend, tmp_path, first, second, expected):
    save_script(Subtract(), tmp_path)
    arrays = {first: floats(5), second: floats(2)}
    batch = run(backend, tmp_path, [(first, F, (1,)), (second, F, (1,))], OUT, arrays, rows=1)
    assert batch.outputs["OUTPUT__0"].tolist() == [[expected]]


def test_a_dictionary_takes_the_names_as_keys(backend, tmp_path):
    save_script(Dictionary(), tmp_path)
    inputs = [("b", F, (1,)), ("a", F, (1,))]
    batch = run(backend, tmp_path, inputs, OUT, {"a": floats(5), "b": floats(2)}, rows=1)
    assert batch.outputs["OUTPUT__0"].tolist() == [[3]]


def test_an_absent_optional_input_is_no_key(backend, tmp_path):
    save_script(Dictionary(), tmp_path)
    described = source(tmp_path, [("a", F, (1,)), TensorSpec("b", F, (1,), optional=True)], OUT, max_batch_size=8)
    batch = FakeBatch({"a": floats(5), "b": None}, {"OUTPUT__0": F}, rows=1)
    instance(backend, described).execute(batch)
    assert batch.outputs["OUTPUT__0"].tolist() == [[5]]


@pytest.mark.parametrize(("scale", "expected"), [(None, 6), (floats(3), 15)])
def test_an_absent_optional_input_is_none(backend, tmp_path, scale, expected):
    save_script(OptionalArgument(), tmp_path)
    described = source(tmp_path, [("x", F, (1,)), TensorSpec("scale", F, (1,), optional=True)], OUT, max_batch_size=8)
    batch = FakeBatch({"x": floats(5), "scale": scale}, {"OUTPUT__0": F}, rows=1)
    instance(backend, described).execute(batch)
    assert batch.outputs["OUTPUT__0"].tolist() == [[expected]]


def test_arguments_with_defaults_may_be_left_out(backend, tmp_path):
    save_script(TensorAfterDefault(), tmp_path)
    inputs = [("y", F, (1,)), ("x", F, (1,))]
    batch = run(backend, tmp_path, inputs, OUT, {"x": floats(5), "y": floats(20)}, rows=1)
    assert batch.outputs["OUTPUT__0"].tolist() == [[26]]


@pytest.mark.parametrize("module", [SumAndDifference, Doubles])
def test_outputs_are_chosen_by_their_index_and_only_those_wanted(backend, tmp_path, module):
    save_script(module(), tmp_path)
    names = ["x", "y"] if module is SumAndDifference else ["x"]
    outputs = [("OUTPUT__1", F, (1,)), ("OUTPUT__0", F, (1,))]
    arrays = {"x": floats(5), "y": floats(2)}
    inputs = [(name, F, (1,)) for name in names]
    batch = run(backend, tmp_path, inputs, outputs, arrays, rows=1)
    found = (batch.outputs["OUTPUT__0"].item(), batch.outputs["OUTPUT__1"].item())
    assert found == ((7, 3) if module is SumAndDifference else (5, 10))
    batch = run(backend, tmp_path, inputs, outputs, arrays, wanted=["OUTPUT__1"], rows=1)
    assert list(batch.outputs) == ["OUTPUT__1"]


@pytest.mark.parametrize(
    ("module", "inputs", "outputs", "text"),
    [
        (Identity, [], OUT, "must contain at least one input"),
        (Identity, [("x", F, (1,))], [], "must contain at least one output"),
        (Subtract, [("left", F, (1,))], OUT, "forward() needs 'right', its argument 1, but the configuration has no"),
        (Identity, [("x", F, (1,)), ("y", F, (1,))], OUT, "configured with 2 inputs, but forward() takes 1: x"),
        (Identity, [("x", "BYTES", (1,))], OUT, "needs an argument of type List[str], but 'x' of forward() must be of"),
        (
            Shout,
            [("x", F, (1,))],
            OUT,
            "needs an argument of type Tensor, but 'words' of forward() must be of type List",
        ),
        (Identity, [TensorSpec("x", F, (1,), optional=True)], OUT, "needs an argument of type Optional[Tensor]"),
        (TwoDictionaries, [("x", F, (1,))], OUT, "Multiple inputs of kind DictType were detected: a, b"),
        (DictionaryAndTensor, [("x", F, (1,))], OUT, "a dictionary must be the only one"),
        (DictionaryOfText, [("x", F, (1,))], OUT, "only Dict[str, Tensor] is supported"),
        (Dictionary, [("x", "BYTES", (1,))], OUT, "input 'x' is BYTES, but forward() takes Tensors"),
        (SumAndDifference, [("x", F, (1,)), ("y", F, (1,))], [(f"O__{i}", F, (1,)) for i in range(3)], "returns 2"),
        (Shout, [("x", "BYTES", (2, 2))], OUT, "Triton only supports 1 dimensional List of String as input"),
        (Shout, [("x", "BYTES", (1,))], [("y", "BYTES", (1, 1))], "1 dimensional List of String as output"),
    ],
)
def test_contradictions_are_refused(backend, tmp_path, module, inputs, outputs, text):
    save_script(module(), tmp_path)
    with pytest.raises(BackendError) as caught:
        backend.load(source(tmp_path, inputs, outputs))
    assert text in str(caught.value)


# -- data


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name != "BYTES"])
def test_every_datatype_passes_without_a_copy(backend, tmp_path, datatype):
    save_script(Identity(), tmp_path)
    array = np.arange(6).astype(NUMPY_TYPES[datatype]).reshape(3, 2)
    batch = run(backend, tmp_path, [("x", datatype, (2,))], [("y", datatype, (2,))], {"x": array}, rows=3)
    assert batch.outputs["y"].dtype == NUMPY_TYPES[datatype]
    assert batch.outputs["y"].tolist() == array.tolist()
    assert np.shares_memory(batch.outputs["y"].view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize(("dims", "rows", "shape"), [((-1,), 0, (3,)), ((1,), 3, (3, 1)), ((), 3, (3,))])
def test_strings_go_in_and_out_in_every_shape(backend, tmp_path, dims, rows, shape):
    save_script(Shout(), tmp_path)
    words = np.array(["a", "é", ""], object)
    array = np.vectorize(str.encode, otypes=[object])(words).reshape(shape)
    batch = run(backend, tmp_path, [("x", "BYTES", dims)], [("y", "BYTES", dims)], {"x": array}, rows=rows)
    assert batch.outputs["y"].shape == shape
    assert [element.decode() for element in batch.outputs["y"].reshape(-1)] == ["a!", "é!", "!"]


def test_an_empty_tensor_of_strings_stays_empty(backend, tmp_path):
    save_script(Shout(), tmp_path)
    empty = {"x": np.empty(0, object)}
    batch = run(backend, tmp_path, [("x", "BYTES", (-1,))], [("y", "BYTES", (-1,))], empty)
    assert batch.outputs["y"].shape == (0,)


def test_strings_beside_tensors(backend, tmp_path):
    save_script(WordsAndLengths(), tmp_path)
    outputs = [("OUTPUT__0", "BYTES", (-1,)), ("OUTPUT__1", "INT64", (-1,))]
    batch = run(backend, tmp_path, [("words", "BYTES", (-1,))], outputs, {"words": np.array([b"ab", b"c"], object)})
    assert batch.outputs["OUTPUT__0"].tolist() == [b"ab", b"c"]
    assert batch.outputs["OUTPUT__1"].tolist() == [2, 1]


class Asserts(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        assert x.size(-1) == 28, "expected 28"
        return x


class Spectrum(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return torch.fft.fft(x)


class OneOrMore(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x if x.size(0) == 2 else x.sum()


class Silent(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        assert x.size(0) == 0
        return x


def test_a_guess_goes_on_behind_an_assertion_of_the_script(backend, tmp_path):
    """Guards `inferd models init`: what the script raises is no torch error, and the next size may be right."""
    signature = backend.guess(source(save_script(Asserts(), tmp_path)), [], whole=False)
    assert signature.inputs == (TensorSpec("x", "FP32", (28,)),)


@pytest.mark.parametrize("module", [Spectrum, OneOrMore, Silent])
def test_what_cannot_be_guessed_is_an_error_of_the_backend(backend, tmp_path, module):
    """Guards datatypes that the protocol lacks, ranks that change with the batch, and errors without a text."""
    with pytest.raises(BackendError, match="ran on nothing that was tried"):
        backend.guess(source(save_script(module(), tmp_path)), [], whole=False)


def test_text_must_be_utf8(backend, tmp_path):
    save_script(Shout(), tmp_path)
    words = {"x": np.array([b"\xff"], object)}
    with pytest.raises(RequestError, match="input 'x' has an element that is not UTF-8 text"):
        run(backend, tmp_path, [("x", "BYTES", (-1,))], [("y", "BYTES", (-1,))], words)


def test_outputs_are_made_contiguous(backend, tmp_path):
    save_script(Transpose(), tmp_path)
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    batch = run(backend, tmp_path, [("x", F, (2, 3))], [("y", F, (3, 2))], {"x": array}, rows=1)
    assert batch.outputs["y"].tolist() == array.transpose(0, 2, 1).tolist()


@pytest.mark.parametrize(("module", "expected"), [(Counter, [1, 2, 3]), (Remembers, [1, 2, 3]), (Weight, [1, 1, 1])])
def test_what_a_module_keeps_is_not_handed_over(backend, tmp_path, module, expected):
    save_script(module(), tmp_path)
    runner = instance(backend, source(tmp_path, [("x", F, (1,))], [("y", F, (-1,))], max_batch_size=8))
    answers = []
    for _ in range(3):
        batch = FakeBatch({"x": floats(1)}, {"y": F}, rows=1)
        runner.execute(batch)
        answers.append(batch.handed_over["y"])
    assert [answer[0, 0].item() for answer in answers] == expected
    if module is Weight:
        answers[0].zero_()
        assert runner.module.weight.sum() == 3


def test_modules_are_in_evaluation_mode(backend, tmp_path):
    save_script(Noise().train(), tmp_path)
    batch = run(backend, tmp_path, [("x", F, (100,))], OUT, {"x": np.ones((1, 100), np.float32)}, rows=1)
    assert batch.outputs["OUTPUT__0"].sum() == 100


# -- errors


def test_a_missing_file_is_named(backend, tmp_path):
    with pytest.raises(BackendError, match=r"unable to find '.*model\.pt' for model 'm'"):
        backend.load(source(tmp_path, [("x", F, (1,))], OUT))


def test_a_file_of_weights_is_refused_with_the_remedy(backend, tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(BackendError, match=r"a TorchScript file is expected: save the result of torch\.jit\.script"):
        backend.load(source(tmp_path, [("x", F, (1,))], OUT))


@pytest.mark.parametrize("content", [b"", b"not a model", b"PK\x03\x04"])
def test_what_is_no_archive_is_refused(backend, tmp_path, content):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(BackendError, match="failed to load model 'm'"):
        backend.load(source(tmp_path, [("x", F, (1,))], OUT))


def test_a_failed_run_says_why_without_the_models_source(backend, tmp_path):
    save_script(Subtract(), tmp_path)
    arrays = {"left": np.zeros((1, 2), np.float32), "right": np.zeros((1, 3), np.float32)}
    with pytest.raises(BackendError) as caught:
        run(backend, tmp_path, [("left", F, (-1,)), ("right", F, (-1,))], OUT, arrays, rows=1)
    assert str(caught.value) == (
        "PyTorch execute failure: RuntimeError: The size of tensor a (2) must match the size of tensor b (3) "
        "at non-singleton dimension 1"
    )


@pytest.mark.parametrize(
    ("module", "outputs", "text"),
    [
        (Anything, OUT, "output 'OUTPUT__0' must be of type Tensor or List[str], forward() returned str"),
        (
            Identity,
            [("y", "BYTES", (1,))],
            "is configured as BYTES, so List[str] is expected; forward() returned Tensor",
        ),
        (Identity, [("y", "INT64", (1,))], "output 'y' is configured as INT64, forward() returned torch.float32"),
        (Doubles, [(f"O__{i}", F, (1,)) for i in range(3)], "configured with 3 outputs, but forward() returned 2"),
    ],
)
def test_a_result_that_is_not_as_configured_is_an_error_of_the_batch(backend, tmp_path, module, outputs, text):
    save_script(module(), tmp_path)
    with pytest.raises(BackendError) as caught:
        run(backend, tmp_path, [("x", F, (1,))], outputs, {"x": floats(1)}, rows=1)
    assert text in str(caught.value)


def test_a_device_that_is_not_served_is_refused(backend, tmp_path):
    save_script(Identity(), tmp_path)
    model = backend.load(source(tmp_path, [("x", F, (1,))], OUT))
    with pytest.raises(BackendError, match="KIND_GPU"):
        model.create_instance(InstanceSpec("m_0", kind="GPU"))


# -- parameters


@pytest.mark.parametrize(
    ("parameters", "inference"), [({}, True), ({"INFERENCE_MODE": "true"}, True), ({"INFERENCE_MODE": "false"}, False)]
)
def test_inference_mode_is_on_unless_the_config_says_otherwise(backend, tmp_path, parameters, inference):
    save_script(Grad(), tmp_path)
    outputs = [("y", "BOOL", (2,))]
    batch = run(backend, tmp_path, [("x", F, (1,))], outputs, {"x": floats(1)}, rows=1, parameters=parameters)
    assert batch.outputs["y"].tolist() == [[False, inference]]


@pytest.mark.parametrize(("disabled", "optimized"), [("false", True), ("true", False)])
def test_optimized_execution_is_switched_off_for_the_execution_alone(backend, tmp_path, disabled, optimized):
    save_script(Identity(), tmp_path)
    described = source(tmp_path, [("x", F, (1,))], OUT, {"DISABLE_OPTIMIZED_EXECUTION": disabled}, max_batch_size=8)
    runner = instance(backend, described)
    seen = []

    class Spy:
        def forward(self, x):
            seen.append(torch._C._get_graph_executor_optimize())
            return x

    runner.module = Spy()
    runner.execute(FakeBatch({"x": floats(1)}, {"OUTPUT__0": F}, rows=1))
    assert seen == [optimized]
    assert torch._C._get_graph_executor_optimize()


@pytest.mark.parametrize("shared", [False, True])
def test_instances_share_weights_only_when_asked_to(backend, tmp_path, shared):
    save_script(Weight(), tmp_path)
    parameters = {"ENABLE_WEIGHT_SHARING": str(shared)}
    model = backend.load(source(tmp_path, [("x", F, (1,))], OUT, parameters, max_batch_size=8))
    first, second = (model.create_instance(InstanceSpec(f"m_{i}")) for i in range(2))
    assert (first.module.weight.data_ptr() == second.module.weight.data_ptr()) is shared


@pytest.mark.parametrize(
    ("key", "function"),
    [
        ("ENABLE_JIT_EXECUTOR", "_jit_set_profiling_executor"),
        ("ENABLE_JIT_PROFILING", "_jit_set_profiling_mode"),
        ("ENABLE_TENSOR_FUSER", "_jit_set_texpr_fuser_enabled"),
    ],
)
def test_switches_of_the_process(backend, tmp_path, monkeypatch, key, function):
    save_script(Identity(), tmp_path)
    called = []
    monkeypatch.setattr(torch._C, function, called.append)
    for parameters in ({key: "false"}, {key: "true"}, {}):
        backend.load(source(tmp_path, [("x", F, (1,))], OUT, parameters))
    assert called == [False, True]


def test_parameters_for_cuda_are_allowed(backend, tmp_path, caplog):
    save_script(Identity(), tmp_path)
    parameters = {"DISABLE_CUDNN": "true", "ENABLE_CACHE_CLEANING": "true"}
    backend.load(source(tmp_path, [("x", F, (1,))], OUT, parameters))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("INFERENCE_MODE", "maybe", "expected true or false"),
        ("ENABLE_CACHE_CLEANING", "2", "expected true or false"),
        ("INTRA_OP_THREAD_COUNT", "0", "expected at least 1"),
        ("INTER_OP_THREAD_COUNT", "x", "expected a whole number"),
    ],
)
def test_wrong_values_are_refused(backend, tmp_path, key, text, expected):
    save_script(Identity(), tmp_path)
    with pytest.raises(BackendError) as caught:
        backend.load(source(tmp_path, [("x", F, (1,))], OUT, {key: text}))
    assert str(caught.value) == f"model 'm': parameter '{key}' is '{text}', {expected}"


def test_unknown_parameters_are_told_and_allowed(backend, tmp_path, caplog):
    save_script(Identity(), tmp_path)
    backend.load(source(tmp_path, [("x", F, (1,))], OUT, {"INFERENCE_MOD": "true"}))
    assert caplog.messages == ["model 'm': parameter 'INFERENCE_MOD' has no effect; did you mean 'INFERENCE_MODE'?"]


THREADS = """
import logging, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
logging.basicConfig(format="%(message)s", stream=sys.stdout)
import torch
from inferd.backends.pytorch import PyTorchBackend
from tests.backends.models import source
for count in ("3", "2"):
    parameters = {"INTRA_OP_THREAD_COUNT": count, "INTER_OP_THREAD_COUNT": "5"}
    described = source(Path(sys.argv[1]), [("x", "FP32", (1,))], [("y", "FP32", (1,))], parameters)
    PyTorchBackend({}).load(described)
    with ThreadPoolExecutor(1) as pool:  # as an instance sees it, on its thread
        print(pool.submit(torch.get_num_threads).result(), torch.get_num_interop_threads())
"""


def test_threads_are_set_by_the_first_model(tmp_path):
    """The pools belong to the process, so it is tried in one of its own."""
    save_script(Identity(), tmp_path)
    done = subprocess.run([sys.executable, "-c", THREADS, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "3 5",
        "parameter 'INTRA_OP_THREAD_COUNT' is 2, but the first PyTorch model set 3",
        "3 5",
    ]


# -- the process


def test_loading_does_not_warn(backend, tmp_path):
    save_script(Identity(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.load(source(tmp_path, [("x", F, (1,))], OUT))


def test_a_process_with_one_model(tmp_path):
    """No pickle is read in Python, neither at load nor by a request; threads are as many as the machine suggests."""
    from inferd.backends.parameters import default_intra_op_threads

    save_script(Identity(), tmp_path)
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
found = []
sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)
import numpy as np
from inferd.backends.pytorch import PyTorchBackend
from tests.backends.fake_batch import FakeBatch
from tests.backends.models import instance, source
runner = instance(PyTorchBackend({}), source(Path(sys.argv[1]), [("x", "FP32", (1,))], [("y", "FP32", (1,))]))
runner.execute(FakeBatch({"x": np.ones(1, np.float32)}, {"y": "FP32"}))
with ThreadPoolExecutor(1) as pool:
    print(found, pool.submit(sys.modules["torch"].get_num_threads).result())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"[] {default_intra_op_threads()}\n"


def test_the_gil_is_released_while_a_model_runs(backend, tmp_path):
    save_script(Busy(), tmp_path)
    runner = instance(backend, source(tmp_path, [("x", F, (-1, -1))], [("y", F, (-1, -1))]))
    batch = FakeBatch({"x": np.zeros((700, 700), np.float32)}, {"y": F})
    assert leaves_turns(lambda: runner.execute(batch))
