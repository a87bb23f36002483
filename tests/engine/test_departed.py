"""Guards that nothing stays of versions that were unloaded or could not be loaded, and that it does not wait for
Python's collector, which in a server that has a framework loaded comes round once in a long while.
"""

from __future__ import annotations

import collections
import gc
import threading
from pathlib import Path

import pytest

from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.errors import ServerError
from tests.engine.serving import CONFIG, Pending, request, row, serving
from tests.engine.test_ensembles import ensemble, model, step
from tests.waiting import until

OURS = ("inferd.server.", "inferd.backends.", "inferd._native.")
PYTHON = CONFIG.replace("puppet", "python")
SENDING = PYTHON + "model_transaction_policy { decoupled: true }\n"
IDENTITY = CONFIG.replace("puppet", "identity")
ANSWERS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x.flat[0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
RAISES = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("on purpose")
"""
ENDS = """
import os

class TritonPythonModel:
    def initialize(self, args):
        os._exit(3)
"""
STEPS = {"m": ensemble(step("one", {"x": "x"}, {"y": "y"})), "one": model()}


def held() -> tuple[int, int, int, collections.Counter[str]]:
    """Descriptors, threads, mappings of files without a name, such as arenas, and objects of ours by their type."""
    kinds = collections.Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    ours = collections.Counter({kind: count for kind, count in kinds.items() if kind.startswith(OURS)})
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), mappings, ours


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def one_life(engine, asking: int, root: Path) -> None:
    """Load the model, ask it, and unload it with requests in it."""
    await engine.load("m")
    pending = [Pending(engine, request(x=row(n % 3 - 1))) for n in range(asking)]
    await engine.unload("m", dependents=True)
    for each in pending:
        await each.answer()


async def no_life(engine, asking: int, root: Path) -> None:
    """Load the model, which fails."""
    with pytest.raises(ServerError):
        await engine.load("m")


async def many_lives(engine, asking: int, root: Path) -> None:
    """Load the model; while it is asked, load it anew and change the number of its instances, in turn; unload it."""
    config, file = root / "m" / "config.pbtxt", root / "m" / "1" / "model.py"
    await engine.load("m")
    written = config.read_text()
    for turn in range(3):
        pending = [Pending(engine, request(x=row(n))) for n in range(asking)]
        if turn % 2:
            file.write_text(f"{file.read_text()}\n# {turn}")
        else:
            config.write_text(written.replace("count: 1", f"count: {2 - turn // 2}"))
        pending += [Pending(engine, request(x=row(n))) for n in range(asking)]
        await engine.load("m")
        for each in pending:
            assert (await each.answer()).status == 0
    config.write_text(written)
    await engine.unload("m")


@pytest.mark.parametrize(
    ("configs", "code", "live", "asking"),
    [
        ({"m": CONFIG}, "", one_life, 20),
        ({"m": IDENTITY}, "", one_life, 20),
        (STEPS, "", one_life, 20),
        ({"m": PYTHON}, ANSWERS, one_life, 20),
        ({"m": SENDING}, ANSWERS, one_life, 0),
        ({"m": PYTHON}, RAISES, no_life, 0),
        ({"m": PYTHON}, ENDS, no_life, 0),
        ({"m": CONFIG}, "", many_lives, 20),
        ({"m": IDENTITY}, "", many_lives, 20),
        ({"m": PYTHON}, ANSWERS, many_lives, 20),
    ],
    ids=[
        *("puppet", "identity", "ensemble", "python", "decoupled", "raises", "ends"),
        *("puppet anew", "identity anew", "python anew"),
    ],
)
async def test_nothing_stays(tmp_path, configs, code, live, asking, native_counters, _no_collector):
    """After a model's life and end, native objects, memory and Python objects are as many as before."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(code)
    control = ModelControl(mode=ControlMode.EXPLICIT, load=())
    async with serving(tmp_path, control=control, **configs) as engine:
        await live(engine, asking, tmp_path)  # what is made once
        before = await settled(engine)
        for _ in range(1 if code else 2):  # workers take their time
            await live(engine, asking, tmp_path)
        after = await settled(engine)
    assert after[:3] == before[:3]
    assert dict(after[3] - before[3]) == {}


async def settled(engine):
    """What is held when the versions that were told to leave have left, and no thread waits for more work."""
    await until(
        lambda: (
            all(entry.state != "UNLOADING" for entry in engine.index())
            and all(thread.name != "engine" for thread in threading.enumerate())
        )
    )
    return held()
