"""auto_complete_config: models complete their configurations, and are refused when they contradict them."""

from __future__ import annotations

import re

import pytest

from tests.backends.python.served import add_model, ask, serving

MODEL = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("completing", config.as_dict()["name"])
        {more}
        config.set_max_batch_size(8)
        config.add_input({{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}})
        config.add_output({{"name": "y", "data_type": "TYPE_INT64", "dims": [-1]}})
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert config["max_batch_size"] == 8 and "dynamic_batching" in config, config
        assert pb_utils.get_input_config_by_name(config, "x")["dims"] == [-1]

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() + 1)]) for r in requests]
"""


@pytest.mark.parametrize("config", ['backend: "python"', None])
async def test_a_model_completes_its_configuration(tmp_path, config, caplog):
    caplog.set_level("INFO")
    version = add_model(tmp_path, "m", MODEL.format(more=""), config or "")
    if config is None:
        (version.parent / "config.pbtxt").unlink()
    async with serving(tmp_path) as engine:
        assert (await ask(engine, 4)).array().tolist() == [[5]]
    assert caplog.text.count("completing m") == 1  # once for the model, in a process of its own


@pytest.mark.parametrize(
    ("more", "config", "expected"),
    [
        ('raise ValueError("not today")', "", "ValueError: not today"),
        ("return {}", "", "auto_complete_config function in model 'm' must return a valid"),
        ("", "max_batch_size: 16", "configuration specified max_batch_size 16, but in auto-complete-config function"),
        ('config.as_dict()["max_batch_size"] = "many"; return config', "", "made no valid configuration"),
    ],
)
async def test_contradictions_are_told(tmp_path, more, config, expected):
    add_model(tmp_path, "m", MODEL.format(more=more), 'backend: "python" ' + config)
    async with serving(tmp_path, problems=1) as engine:
        [entry] = engine.index()
        assert expected in entry.reason


@pytest.mark.parametrize(
    ("head", "more", "expected"),
    [
        ("import os; os._exit(9)", "", "worker process exited with status 9"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "",
            r"was killed by signal 9 \(SIGKILL\), as the system does when memory",
        ),
        ("", "import os; os.kill(os.getpid(), 11)", r"was killed by signal 11 \(SIGSEGV\)"),
    ],
)
async def test_a_worker_that_ends_before_the_configuration_is_complete_is_told(tmp_path, head, more, expected, caplog):
    """Guards the error of an import without memory, or of a broken C extension: one sentence, no traceback."""
    add_model(tmp_path, "m", head + MODEL.format(more=more), 'backend: "python"')
    async with serving(tmp_path, problems=1) as engine:
        [entry] = engine.index()
        assert re.search(expected, entry.reason)
    assert "Traceback" not in caplog.text
