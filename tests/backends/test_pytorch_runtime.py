"""Modules in Python, `runtime: "model.py"`: loaded with their weights, compiled, and run by workers."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap

import numpy as np
import pytest

from inferd.backends.api import BackendError
from inferd.backends.pytorch.runtime import load_module
from tests.backends.models import source
from tests.engine.serving import infer, request, serving_folder

torch = pytest.importorskip("torch")

CONFIG = """
backend: "pytorch"
runtime: "model.py"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
dynamic_batching {{ max_queue_delay_microseconds: 20000 }}
{more}
"""
EAGER = """
parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: '{"disable": true}' } }
"""
SCALE = """
import torch
from torch.nn import Linear, Module

class Scale(Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        if not torch.compiler.is_compiling() and bool((x == 13).any()):
            raise ValueError("thirteen")
        return x * self.factor
"""


def add_model(root, name, code=SCALE, weights=2.0, more=EAGER, instances=1):
    version = root / name / "1"
    version.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(CONFIG.format(more=more, instances=instances))
    (version / "model.py").write_text(textwrap.dedent(code))
    if weights is not None:
        torch.save({"factor": torch.tensor(weights)}, version / "model.pt")
    return version


def test_syntax_of_another_python_is_left_to_that_python(tmp_path):
    """Guards models with an environment of their own: it may have a newer Python than the server."""
    (tmp_path / "model.py").write_text("what no Python has:")
    tensors = [("x", "FP32", (2,))], [("y", "FP32", (2,))]
    with pytest.raises(BackendError, match=r"model\.py:1: SyntaxError"):
        load_module(source(tmp_path, *tensors), {}, None)
    load_module(source(tmp_path, *tensors, {"EXECUTION_ENV_PATH": sys.base_prefix}), {}, None)


async def ask(engine, *rows, model="m"):
    return await infer(engine, request(model, x=np.array(rows, np.float32)))


async def test_weights_are_loaded_requests_are_one_batch_and_an_error_fails_its_batch_alone(tmp_path):
    add_model(tmp_path, "m")
    file = tmp_path / "m" / "config.pbtxt"
    file.write_text(file.read_text().replace("max_batch_size: 8", "max_batch_size: 4").replace("20000", "60000000"))
    async with serving_folder(tmp_path) as engine:
        answers = await asyncio.gather(ask(engine, [1, 2]), ask(engine, [3, 4], [5, 6]), ask(engine, [7, 8]))
        assert [each.array("y").tolist() for each in answers] == [[[2, 4]], [[6, 8], [10, 12]], [[14, 16]]]
        assert engine.model("m").statistics().execution_count == 1
        assert "thirteen" in (await ask(engine, [13, 0], *[[1, 0]] * 3)).text
        assert (await ask(engine, *[[1, 0]] * 4)).array("y").tolist() == [[2, 0]] * 4


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
async def test_it_is_compiled(tmp_path):
    """With its own arguments; a compiled module does not come to the line that only an interpreted one has."""
    more = EAGER.replace('{"disable": true}', '{"dynamic": true, "backend": "aot_eager"}')
    add_model(tmp_path, "m", more=more)
    async with serving_folder(tmp_path) as engine:
        assert (await ask(engine, [13, 1])).array("y").tolist() == [[26, 2]]


async def test_outputs_of_every_kind_of_two_instances(tmp_path):
    """A sum; one that is not contiguous; a parameter; a view that PyTorch negates when it is read; bits of BF16."""
    code = """
        import torch

        class All(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.tensor([[7.0]]))

            def forward(self, x):
                assert torch.is_inference_mode_enabled()
                turned = torch.stack([x[:, 1], x[:, 0]]).t()
                minus = torch.complex(x, x).conj().imag
                return x + 1, turned, self.weight.expand(x.shape[0], 1), minus, x.to(torch.bfloat16)
    """
    version = add_model(tmp_path, "m", code, weights=None, instances=2)
    config = version.parent / "config.pbtxt"
    more = [("turned", "FP32", 2), ("weight", "FP32", 1), ("minus", "FP32", 2), ("bits", "BF16", 2)]
    lines = [f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [ {size} ] }}' for name, kind, size in more]
    config.write_text("\n".join([config.read_text(), *lines]))
    async with serving_folder(tmp_path) as engine:
        asked = [[i, 2 * i] for i in range(20)]
        for (a, b), answer in zip(asked, await asyncio.gather(*(ask(engine, row) for row in asked)), strict=True):
            assert answer.array("y").tolist() == [[a + 1, b + 1]]
            assert answer.array("turned").tolist() == [[b, a]]
            assert answer.array("weight").tolist() == [[7]]
            assert answer.array("minus").tolist() == [[-a, -b]]
            names = [output.name for output in answer.response.outputs]
            bits = np.frombuffer(answer.response.raw_output_contents[names.index("bits")], np.uint16)
            assert (bits.astype(np.uint32) << 16).view(np.float32).tolist() == [a, b]


async def test_a_torchscript_archive_in_place_of_the_module(tmp_path):
    version = add_model(tmp_path, "m", weights=None)
    (version / "model.py").unlink()

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            return x * 2

    torch.jit.script(Twice()).save(str(version / "model.pt"))
    async with serving_folder(tmp_path) as engine:
        assert (await ask(engine, [1, 2])).array("y").tolist() == [[2, 4]]


BROKEN = {
    "no_class": ("import torch", EAGER, "Cannot find a subclass of torch.nn.Module"),
    "error": ("raise RuntimeError('of its own')", EAGER, "of its own"),
    "weights": (SCALE.replace("self.factor", "self.other"), EAGER, "factor"),
    "compile": (
        SCALE,
        EAGER.replace("disable", "speed"),
        "parameter 'TORCH_COMPILE_OPTIONAL_PARAMETERS' is '{\"speed\": true}', which torch.compile refuses: ",
    ),
}


async def test_what_keeps_it_from_loading_is_told(tmp_path):
    for name, (code, more, _) in BROKEN.items():
        add_model(tmp_path, name, code, more=more)
    async with serving_folder(tmp_path, problems=len(BROKEN)) as engine:
        for name, (_, _, text) in BROKEN.items():
            assert text in engine.problems[name]


async def test_a_file_of_more_than_weights_needs_consent(tmp_path):
    """Otherwise everybody who can write to the weights could run code in the worker."""
    version = add_model(tmp_path, "m")
    (version / "model.pt").unlink()

    class Evil:
        def __reduce__(self):
            return (dict, ())

    torch.save(Evil(), version / "model.pt")
    async with serving_folder(tmp_path, problems=1) as engine:
        assert "is loaded with WEIGHTS_ONLY false" in engine.problems["m"]
    code = SCALE + "    def load_state_dict(self, state):\n        assert state == {}\n"
    (version / "model.py").write_text(code)
    config = version.parent / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "WEIGHTS_ONLY" value { string_value: "false" } }')
    async with serving_folder(tmp_path) as engine:
        assert (await ask(engine, [1, 2])).array("y").tolist() == [[1, 2]]


X, Y = ("x", "FP32", (2,)), ("y", "FP32", (2,))


@pytest.mark.parametrize(
    ("parameters", "tensors", "code", "text"),
    [
        ({"NUM_THREADS": "0"}, [X], SCALE, "parameter 'NUM_THREADS' is '0', expected at least 1"),
        ({"WEIGHTS_ONLY": "perhaps"}, [X], SCALE, "expected true or false"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "[]"}, [X], SCALE, "expected a JSON object of arguments"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"model": 1}'}, [X], SCALE, "expected no 'model'"),
        ({}, [], SCALE, "must contain at least one input"),
        ({}, [("x", "BYTES", (2,))], SCALE, "input 'x' is TYPE_STRING"),
        ({}, [X], "def f(:", r"model.py:1: SyntaxError"),
        ({}, [X], None, "unable to find"),
    ],
)
def test_what_is_seen_without_running_it(tmp_path, parameters, tensors, code, text):
    if code is not None:
        (tmp_path / "model.py").write_text(code)
    described = source(tmp_path, tensors, [Y], parameters, max_batch_size=8, runtime="model.py")
    with pytest.raises(BackendError) as caught:
        load_module(described, {}, None)
    assert text in str(caught.value)


async def test_other_runtimes_are_refused(tmp_path):
    version = add_model(tmp_path, "m")
    config = version.parent / "config.pbtxt"
    config.write_text(config.read_text().replace('runtime: "model.py"', 'runtime: "fast.so"'))
    async with serving_folder(tmp_path, problems=1) as engine:
        problem = "backend 'pytorch' has no runtime 'fast.so' for model 'm': write model.py, or remove it"
        assert problem in engine.problems["m"]
