"""Labels of versions: a request that names one is executed by the version that it stands for."""

from __future__ import annotations

import pytest

from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.errors import InvalidArgument, Status
from tests.engine.serving import CONFIG, Gate, Pending, ensemble_of, infer, request, row, serving
from tests.engine.test_departing_sequences import Generations, ask, closed
from tests.engine.test_departing_sequences import config as with_sequences

pytestmark = pytest.mark.usefixtures("native_counters")

EXPLICIT = ModelControl(ControlMode.EXPLICIT, (ALL,))
LAZY = ModelControl(ControlMode.LAZY)
EVERY = "version_policy { all { } }"
UNKNOWN = (
    "failed to get model version from specified version string '{}' (details: stol), version should be an integral "
    "value > 0"
)


def labels(text: str) -> str:
    return f'parameters {{ key: "version_labels" value {{ string_value: "{text}" }} }}'


def write_versions(root, name: str = "m", versions=(1, 2, 3)):
    for version in versions:
        (root / name / str(version)).mkdir(parents=True, exist_ok=True)
    return root


def asking(version: str, model: str = "m", x: int = 1):
    message = request(model, x=row(x))
    message.model_version = version
    return message


async def served_by(engine, version: str, model: str = "m") -> str:
    answer = await infer(engine, asking(version, model))
    assert answer.status == Status.OK, answer.text
    return answer.response.model_version


async def test_a_label_stands_for_its_version(tmp_path):
    """Guards look-ups, statistics and the error for other names; a model without labels answers as in Triton."""
    write_versions(write_versions(tmp_path), "plain")
    configs = {"m": CONFIG + EVERY + labels("stable=1, canary=3"), "plain": CONFIG}
    async with serving(tmp_path, **configs) as engine:
        assert [await served_by(engine, each) for each in ("stable", "canary", "2", "")] == ["1", "3", "2", "3"]
        assert [engine.model("m", each).version for each in ("stable", "canary")] == [1, 3]
        assert [engine.model("m", str(v)).statistics().inference_count for v in (1, 2, 3)] == [1, 1, 2]
        answer = await infer(engine, asking("Stable"))
        text = UNKNOWN.format("Stable") + ", or a version label of the model"
        assert (answer.status, answer.text) == (Status.INVALID_ARGUMENT, text)
        with pytest.raises(InvalidArgument, match="or a version label"):
            engine.model("m", "Stable")
        answer = await infer(engine, asking("stable", "plain"))
        assert (answer.status, answer.text) == (Status.INVALID_ARGUMENT, UNKNOWN.format("stable"))


async def test_a_moved_label_loads_nothing(tmp_path):
    """Guards that versions stay when the labels alone change, and that labels go with what they name."""
    write_versions(tmp_path)
    async with serving(tmp_path, control=EXPLICIT, m=CONFIG + EVERY + labels("stable=1")) as engine:
        before = engine.versions("m")
        path = tmp_path / "m" / "config.pbtxt"
        path.write_text(CONFIG + EVERY + labels("stable=2"))
        await engine.load("m")
        assert await served_by(engine, "stable") == "2"
        assert engine.versions("m") == before and closed(engine) == 0
        assert "stable=2" in str(engine.model("m").config)
        path.write_text(CONFIG + EVERY)
        await engine.load("m")
        assert (await infer(engine, asking("stable"))).status == Status.INVALID_ARGUMENT
        path.write_text(CONFIG + EVERY + labels("stable=9"))
        with pytest.raises(InvalidArgument, match="stands for version 9"):
            await engine.load("m")
        await engine.unload("m")
        assert (await infer(engine, asking("stable"))).status == Status.NOT_FOUND


@pytest.mark.parametrize("stays", [True, False])
async def test_a_sequence_goes_on_where_it_began(tmp_path, stays):
    """Guards sequences that name a label: it is moved, and the version that it stood for stays or is unloaded."""
    write_versions(tmp_path, versions=(1, 2))
    text = with_sequences() + EVERY
    async with serving(tmp_path, Generations(), control=EXPLICIT, m=text + labels("stable=1")) as engine:
        assert await ask(engine, 1, 1, start=True, version="stable") == (0, 1)
        policy = EVERY if stays else "version_policy { specific { versions: 2 } }"
        (tmp_path / "m" / "config.pbtxt").write_text(with_sequences() + policy + labels("stable=2"))
        await engine.load("m")
        assert await ask(engine, 5, 2, start=True, version="stable") == (1, 5)
        assert await ask(engine, 10, 1, version="stable") == (0, 11)
        assert await ask(engine, 10, 2, version="2") == (1, 15)
        assert await ask(engine, 10, 1, version="stable", end=True) == (0, 21)


async def test_a_request_for_a_label_loads_the_model(tmp_path):
    """Guards loading on demand: the labels are known once the model is loaded."""
    write_versions(tmp_path)
    async with serving(tmp_path, control=LAZY, m=CONFIG + EVERY + labels("stable=2")) as engine:
        assert await served_by(engine, "stable") == "2"
        await engine.unload("m")
        answer = await infer(engine, asking("other"))
        assert (answer.status, "version label" in answer.text) == (Status.INVALID_ARGUMENT, True)
        assert await served_by(engine, "stable") == "2"


async def test_a_label_and_its_number_share_an_execution(tmp_path):
    """Guards coalescing: the version decides, not its name in the request."""
    write_versions(tmp_path)
    gate = Gate()
    shared = 'parameters { key: "coalesce_requests" value { string_value: "true" } }'
    async with serving(tmp_path, gate, m=CONFIG + EVERY + shared + labels("stable=1")) as engine:
        first = Pending(engine, asking("stable"))
        await gate.entered()
        second, third = Pending(engine, asking("1")), Pending(engine, asking("2"))
        gate.go(2)
        answers = [(await each.answer()).response.model_version for each in (first, second, third)]
        assert answers == ["1", "1", "2"]
        assert len(gate.batches) == 2 and engine.infer.reuse()["followers"] == 1


async def test_ensembles_have_labels(tmp_path):
    """Guards labels of an ensemble's own versions."""
    write_versions(tmp_path, "e", (1, 2))
    configs = {"m": CONFIG, "e": ensemble_of("m") + EVERY + labels("stable=1")}
    async with serving(tmp_path, **configs) as engine:
        assert [await served_by(engine, each, "e") for each in ("stable", "")] == ["1", "2"]
