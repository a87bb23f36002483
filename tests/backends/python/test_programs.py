"""Python-based backends: one program in the backend directory runs every model that names it."""

from __future__ import annotations

import asyncio

import pytest

from inferd.backends.api import BackendError
from inferd.backends.loader import BackendLoader
from tests.backends.python.served import ask
from tests.engine.serving import serving_folder

PROGRAM = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils
import beside

class TritonPythonModel:
    def initialize(self, args):
        self.factor = int(open(os.path.join(pb_utils.get_model_dir(), "factor.txt")).read())
        assert json.loads(args["model_config"])["backend"] == "scale"

    def execute(self, requests):
        def answer(request):
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", beside.times(x, self.factor))])
        return [answer(request) for request in requests]
"""
CONFIG = """
backend: "scale"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


async def test_a_program_runs_many_models(tmp_path):
    backends, models = tmp_path / "backends", tmp_path / "models"
    (backends / "scale").mkdir(parents=True)
    (backends / "scale" / "model.py").write_text(PROGRAM)
    (backends / "scale" / "beside.py").write_text("def times(x, factor): return x * factor")
    for factor in (2, 3):
        version = models / f"by_{factor}" / "1"
        version.mkdir(parents=True)
        (version / "factor.txt").write_text(str(factor))
        (version.parent / "config.pbtxt").write_text(CONFIG)
    async with serving_folder(models, BackendLoader(directory=backends)) as engine:
        answers = await asyncio.gather(ask(engine, 5, model="by_2"), ask(engine, 5, model="by_3"))
        assert [answer.array("y").tolist() for answer in answers] == [[[10]], [[15]]]


def test_only_the_python_backend_runs_programs(tmp_path):
    with pytest.raises(BackendError, match="backend 'identity' runs no programs"):
        BackendLoader().backend("identity").for_program("x", tmp_path / "model.py")
