"""Models that load and unload others, and measure: `pb_utils` against a real engine, in processes and in the server."""

import asyncio

import pytest

from inferd.backends.python.instance import PythonInstance
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.errors import Status
from inferd.server.observe.metrics.own import OwnMetrics
from tests.backends.python.served import CONFIG, Readiness, add_model, ask, serving, wait_for
from tests.engine.serving import infer, request, row
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("native_counters")

IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "in-process" } }'

# Executes the code that its first input stands for, and answers with a number or an error.
CONTROLLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

CONFIG = json.dumps({{
    "backend": "python", "max_batch_size": 8,
    "input": [{{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}}],
    "output": [{{"name": "y", "data_type": "TYPE_INT64", "dims": [-1]}}],
}})
TIMES = '''
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() * 7)]) for r in requests]
'''

def what(case):
    match case:
        case 0: return int(pb_utils.is_model_ready("other"))
        case 1: return pb_utils.load_model(model_name="other") or 1
        case 2: return pb_utils.unload_model("other") or 1
        case 3: return pb_utils.load_model("other", config=CONFIG, files={{"file:1/model.py": TIMES.encode()}}) or 1
        case 4: return pb_utils.load_model("nothing")
        case 5: return pb_utils.load_model("m") or 1
        case 6: return int(pb_utils.is_model_ready("other", "1")) + 10 * int(pb_utils.is_model_ready("other", "2"))
        case 7: return pb_utils.unload_model("m", unload_dependents=True) or 1

class TritonPythonModel:
    {how} execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = what(int(request.inputs()[0].as_numpy().flat[0]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[value]], np.int64))])
"""

ECHO = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.fixture(params=["def", "async def", "in-process"])
def root(request, tmp_path):
    """A repository with a controller "m" and the model "other" that it controls."""
    in_process = request.param == "in-process"
    code = CONTROLLER.format(how="def" if in_process else request.param)
    add_model(tmp_path, "m", code, CONFIG + (IN_PROCESS if in_process else ""))
    add_model(tmp_path, "other", ECHO)
    return tmp_path


def explicit(*names):
    return ModelControl(ControlMode.EXPLICIT, names)


async def said(engine, case):
    answer = await ask(engine, case)
    assert (answer.status, answer.text) == (Status.OK, "")
    return answer.array().item()


async def test_a_model_controls_another_one(root):
    async with serving(root, control=explicit("m")) as engine:
        assert await said(engine, 0) == 0
        assert await said(engine, 1) == 1
        assert await said(engine, 0) == 1
        assert await said(engine, 6) == 1
        assert (await ask(engine, 3, model="other")).array().item() == 3
        assert await said(engine, 3) == 1
        assert (await ask(engine, 3, model="other")).array().item() == 21
        assert await said(engine, 2) == 1
        assert await said(engine, 0) == 0
        answer = await ask(engine, 4)
        assert "Failed to load model: failed to load 'nothing', failed to poll from model repository" in answer.text


async def test_a_model_has_itself_reloaded_and_unloaded_from_inside_of_execute(root):
    async with serving(root, control=explicit("m")) as engine:
        version = engine.model("m")
        file = root / "m" / "1" / "model.py"
        file.write_text(file.read_text() + "# changed\n")
        assert await asyncio.wait_for(said(engine, 5), 60) == 1
        assert engine.model("m") is not version
        assert await asyncio.wait_for(said(engine, 7), 60) == 1
        assert (await ask(engine, 0)).status == Status.NOT_FOUND


async def test_control_is_refused_where_it_is_off(root):
    async with serving(root) as engine:
        answer = await ask(engine, 1)
        assert "explicit model load / unload is not allowed if polling is enabled" in answer.text
        assert await said(engine, 0) == 1


async def test_what_a_dead_worker_has_asked_is_not_answered_to_the_next(tmp_path):
    """Each worker counts its questions from one: an answer that comes late would be taken for that to another."""
    slow = """
import pathlib, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(args["model_repository"])
        (folder / "loading").touch()
        while not (folder / "go").exists():
            time.sleep(0.001)
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
    asks = f"""
import os, pathlib, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy().flat[0] == 1:
            threading.Thread(target=pb_utils.load_model, args=("first",)).start()
            while not pathlib.Path({str(tmp_path / "first" / "loading")!r}).exists():
                time.sleep(0.001)
            os._exit(1)
        pb_utils.load_model("second")
        ready = np.array([[pb_utils.is_model_ready("second")]], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", ready)])]
"""
    add_model(tmp_path, "first", slow)
    add_model(tmp_path, "second", slow)
    async with serving(tmp_path, control=explicit("m"), m=asks) as engine:
        assert (await ask(engine, 1)).status == Status.UNAVAILABLE
        asked = asyncio.ensure_future(ask(engine, 2))
        await asyncio.to_thread(wait_for, tmp_path / "second" / "loading")
        readiness = Readiness(engine)
        (tmp_path / "first" / "go").touch()
        await readiness.until(("first", True))
        for _ in range(50):  # turns of the loop, in which the first answer is sent
            await ask(engine, 0, model="first")
        assert not asked.done()
        (tmp_path / "second" / "go").touch()
        assert (await asked).array().item() == 1


async def test_a_model_loads_another_one_in_initialize(tmp_path):
    add_model(tmp_path, "other", ECHO)
    initialize = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        if not pb_utils.is_model_ready("other"):
            pb_utils.load_model("other")
        try:
            pb_utils.load_model("m")
        except pb_utils.TritonModelException as error:
            self.refused = str(error)
    def execute(self, requests):
        assert "while it is loaded itself" in self.refused, self.refused
        ready = pb_utils.InferenceRequest(
            model_name="other", inputs=[requests[0].inputs()[0]], requested_output_names=["y"]).exec()
        return [pb_utils.InferenceResponse(ready.output_tensors())]
"""
    async with serving(tmp_path, control=explicit("m"), m=initialize) as engine:
        assert (await ask(engine, 5)).array().item() == 5


NEEDS = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model("{}")
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


async def test_models_that_are_loaded_wait_for_no_load_that_waits_for_their_place(tmp_path):
    """Each of those that have the places asks for one that a client has asked for, too, and that waits for a place."""
    for i in range(4):
        add_model(tmp_path, f"need{i}", NEEDS.format(f"other{i}"))
        add_model(tmp_path, f"other{i}", ECHO)
    async with serving(tmp_path, control=explicit()) as engine:
        names = [f"{kind}{i}" for kind in ("need", "other") for i in range(4)]
        assert await asyncio.gather(*map(engine.load, names)) == [None] * 8
        assert (await ask(engine, 3, model="need0")).array().item() == 3


async def test_a_chain_of_models_that_load_each_other_starts(tmp_path):
    """The chain is longer than as many models as load at a time, and begins with the one that needs all others."""
    for i in range(5):
        add_model(tmp_path, f"a{i}", NEEDS.format(f"a{i + 1}"))
    add_model(tmp_path, "a5", ECHO)
    async with serving(tmp_path, control=explicit("*")) as engine:
        assert {each.state for each in engine.index()} == {"READY"}


# -- metrics --

MEASURING = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("answers", "how many", pb_utils.MetricFamily.COUNTER)
        self.answers = family.Metric(labels={"model": args["model_name"]})
        sizes = pb_utils.MetricFamily(name="sizes", description="how big", kind=pb_utils.MetricFamily.HISTOGRAM)
        self.sizes = sizes.Metric(labels={}, buckets=[1.0, 2.5])
    def execute(self, requests):
        out = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if x.flat[0] < 0:
                self.sizes = None
                import os, signal
                if x.flat[0] < -1:
                    os.kill(os.getpid(), signal.SIGKILL)
            else:
                self.answers.increment(1)
                self.sizes.observe(float(x.flat[0]))
            value = int(self.answers.value())
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[value]], np.int64))]))
        return out
"""


def measured(engine):
    """What is kept: name to (kind, [(labels, value, buckets)])."""
    return {
        family.name: (family.kind, [(dict(each.labels), each.value, each.buckets) for each in family.samples])
        for family in engine.measures.snapshot()
    }


async def test_instances_count_together(tmp_path):
    add_model(tmp_path, "m", MEASURING, CONFIG.replace("count: 1", "count: 2"))
    async with serving(tmp_path, control=explicit("m"), n=MEASURING) as engine:
        for n, seen in enumerate((1, 2, 3), 1):
            assert (await ask(engine, seen)).array().item() == n
        found = measured(engine)
        assert found["answers"] == ("counter", [({"model": "m"}, 3.0, ())])
        assert found["sizes"] == ("histogram", [({}, 6.0, ((1.0, 1), (2.5, 2), (float("inf"), 3)))])
        await engine.load("n")
        assert (await infer(engine, request("n", x=row(1)))).array().item() == 1
        assert [labels for labels, _, _ in measured(engine)["answers"][1]] == [{"model": "m"}, {"model": "n"}]
        await engine.unload("m")
        await engine.unload("n")
        await until(lambda: not measured(engine))


async def test_metrics_go_with_what_made_them(tmp_path):
    async with serving(tmp_path, m=MEASURING) as engine:
        await ask(engine, 1)
        assert (await ask(engine, -1)).array().item() == 1
        assert set(measured(engine)) == {"answers"}
        answer = await ask(engine, -2)  # the worker dies, and another one begins from nothing
        assert answer.status != Status.OK
        while (await ask(engine, 1)).status != Status.OK:  # noqa: ASYNC110 - a worker that is down is said to be
            await asyncio.sleep(0.01)
        assert measured(engine)["answers"][1][0][1] == 1.0


CALLER = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        out = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="other", inputs=[request.inputs()[0]], requested_output_names=["y"])
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            out.append(pb_utils.InferenceResponse(response.output_tensors()))
        return out
"""


async def test_no_call_is_lost_while_workers_are_replaced(tmp_path):
    """A model and the one that it calls are loaded anew, again and again, under requests."""
    async with serving(tmp_path, control=explicit("m", "other"), m=CALLER, other=ECHO) as engine:
        answers = []
        reloading = True

        async def callers(first):
            while reloading:
                answers.append((first, await ask(engine, first)))

        async def reload(name):
            file = tmp_path / name / "1" / "model.py"
            for number in range(3):
                file.write_text(f"{file.read_text()}\n# {number}\n")
                await engine.load(name)

        asking = [asyncio.create_task(callers(number)) for number in range(4)]
        await asyncio.gather(reload("m"), reload("other"))
        reloading = False
        await asyncio.gather(*asking)
        assert {(answer.status, answer.text) for _, answer in answers} == {(Status.OK, "")}
        assert all(answer.array().item() == first for first, answer in answers)


CURIOUS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = []

        def look():
            try:
                found.append(pb_utils.is_model_ready("slow"))
            except pb_utils.TritonModelException as error:
                found.append(str(error))

        threads = [threading.Thread(target=look) for _ in range(300)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        refused = sum("too many calls" in str(each) for each in found)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[found.count(True), refused]]))])]
"""
SLOW = """
import pathlib, time
class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
    def is_ready(self):
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return True
    def execute(self, requests):
        pass
"""


async def test_questions_beyond_the_limit_are_refused(tmp_path, monkeypatch):
    """And their worker lives: nothing keeps a model from having many threads."""
    async with serving(tmp_path, m=CURIOUS, slow=SLOW) as engine:
        refused = asyncio.Event()
        answer_call = PythonInstance._answer_call

        def answers(self, life, number, size, done):
            if done.exception() is not None and not refused.is_set():
                loop.call_soon_threadsafe(refused.set)
            answer_call(self, life, number, size, done)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(PythonInstance, "_answer_call", answers)
        answer = asyncio.ensure_future(ask(engine, 1))
        await refused.wait()
        (tmp_path / "slow" / "go").touch()
        ready, unready = (await answer).array().tolist()[0]
        assert ready + unready == 300
        assert ready >= 256


UNPRINTABLE = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily(name="files", description="of \\udcff", kind=pb_utils.MetricFamily.COUNTER)
        self.metric = family.Metric(labels={"file": "caf\\udcff"})
        self.metric.increment(2)
    def execute(self, requests):
        y = pb_utils.Tensor("y", np.array([[self.metric.value()]], np.int64))
        return [pb_utils.InferenceResponse([y]) for request in requests]
import numpy as np
"""


async def test_text_of_a_metric_that_is_not_utf_8_is_shown_in_part(tmp_path):
    """As names of files may be, which Python decodes with lone surrogates. The page with all metrics has it."""
    async with serving(tmp_path, m=UNPRINTABLE) as engine:
        assert (await ask(engine, 1)).array().tolist() == [[2]]
        page = b"".join(OwnMetrics().render(engine.measures.snapshot(), (), openmetrics=False)).decode()
        assert "# HELP files of ?" in page
        assert 'files{file="caf?"} 2' in page


async def test_an_infinite_bucket_is_shown_once(tmp_path):
    """Models bring it from other clients of Prometheus, which refuses two samples with the same labels."""
    code = MEASURING.replace("buckets=[1.0, 2.5]", "buckets=[1.0, float('inf')]")
    async with serving(tmp_path, m=code) as engine:
        assert (await ask(engine, 3)).array().item() == 1
        page = b"".join(OwnMetrics().render(engine.measures.snapshot(), (), openmetrics=False)).decode()
        assert [line for line in page.splitlines() if line.startswith("sizes_bucket")] == [
            'sizes_bucket{le="1.0"} 0', 'sizes_bucket{le="+Inf"} 1'
        ]  # fmt: skip
