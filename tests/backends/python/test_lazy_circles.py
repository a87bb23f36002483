"""Models on demand that ask each other while they are loaded: a circle is an error at once, anything else works."""

import asyncio
from pathlib import Path

import pytest

from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.errors import ServerError
from tests.backends.python.served import CONFIG, add_model, ask, serving, wait_for
from tests.engine.serving import infer_all, request, row

WARM = (
    CONFIG
    + """
model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } } }
"""
)
LAZY = ModelControl(ControlMode.LAZY)


def asking(other: str) -> str:
    """Answers a zero, as in a warm-up, with what another model answers to it, and other numbers with themselves.

    `before` is called before that.
    """
    return f"""
    import pathlib, threading, time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.folder = pathlib.Path(args["model_repository"])

        def before(self, call):
            pass

        def wait_for(self, file):
            ends = time.monotonic() + 60
            while not file.exists():
                assert time.monotonic() < ends
                time.sleep(0.001)

        def execute(self, requests):
            return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

        def answer(self, x):
            if {other!r} and x.flat[0] <= 0:
                call = pb_utils.InferenceRequest(
                    model_name={other!r}, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)])
                self.before(call)
                answer = call.exec()
                if answer.has_error():
                    return pb_utils.InferenceResponse(error=answer.error())
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
    """


def add_warm(root: Path, **asked: str) -> None:
    """Models that ask, when they are warmed up, the ones that are named."""
    for name, other in asked.items():
        add_model(root, name, asking(other), WARM)


@pytest.mark.parametrize("asked", [["a"], ["a", "b"]])
async def test_models_whose_loads_wait_for_each_other_are_told(tmp_path, asked):
    """Whether one client has asked for one of them, or two for both."""
    add_warm(tmp_path, a="b", b="a")
    async with serving(tmp_path, control=LAZY) as engine:
        answers = await infer_all(engine, *(request(name, x=row(1)) for name in asked))
        assert {answer.status for answer in answers} == {14}
        assert "model 'b' asks for 'a' while it is loaded itself" in answers[0].text or (
            "model 'a' asks for 'b' while it is loaded itself" in answers[0].text
        )


async def test_the_circle_is_found_behind_other_models(tmp_path):
    """One asks by a model that is loaded, the next by one that is loaded itself."""
    add_warm(tmp_path, a="by", b="c", c="a")
    async with serving(tmp_path, control=LAZY, by=asking("b")) as engine:
        assert (await ask(engine, 1, model="by")).status == 0
        answer = await ask(engine, 1, model="a")
        assert answer.status == 14
        assert (
            "model 'c' asks for 'a' while it is loaded itself, and the load of 'a' waits for that of 'b', which waits "
            "for that of 'c'"
        ) in answer.text


async def test_a_model_may_ask_one_that_is_loaded_with_it(tmp_path):
    """Both are loaded at the start, under one lock."""
    add_warm(tmp_path, a="b", b="")
    async with serving(tmp_path, control=ModelControl(ControlMode.LAZY, ("a", "b"))) as engine:
        assert (await ask(engine, 1, model="a")).status == 0


async def test_models_that_are_loaded_together_and_ask_each_other_are_told(tmp_path):
    add_warm(tmp_path, a="b", b="a")
    async with serving(tmp_path, problems=2, control=ModelControl(ControlMode.LAZY, ("a", "b"))) as engine:
        assert any("while it is loaded itself" in entry.reason for entry in engine.index())


HASTY = (
    asking("slow")
    + """
        def before(self, call):
            loads = len(list(self.folder.glob("load*")))
            (self.folder / f"load{loads}").touch()
            if loads == 0:
                threading.Thread(target=call.exec, daemon=True).start()
                self.wait_for(self.folder.parent / "slow" / "begun")
                raise ValueError("it does not wait for the answer")
    """
)
SLOW = (
    asking("hasty")
    + """
        def before(self, call):
            (self.folder / "begun").touch()
            self.wait_for(self.folder / "go")
    """
)


async def test_the_circle_is_found_by_a_second_load_that_asks_for_the_same(tmp_path):
    """The first load has failed, and the load that it has asked for goes on."""
    add_model(tmp_path, "hasty", HASTY, WARM)
    add_model(tmp_path, "slow", SLOW, WARM)
    async with serving(tmp_path, control=LAZY) as engine:
        with pytest.raises(ServerError, match="does not wait"):
            await engine.load("hasty")
        load = asyncio.create_task(engine.load("hasty"))
        await asyncio.to_thread(wait_for, tmp_path / "hasty" / "load1")
        (tmp_path / "slow" / "go").touch()
        with pytest.raises(ServerError, match="while it is loaded itself"):
            await asyncio.wait_for(load, 60)
