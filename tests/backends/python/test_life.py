"""Workers die, hang, and print what they like; the server and the other models do not notice."""

import asyncio
import contextlib
import gc
import json
import logging
import platform
import re
import sys
import weakref

import numpy as np
import psutil
import pytest
from tritonclient import grpc as triton

from bench.processes import ServerProcess, free_port
from inferd.backends.python import process
from inferd.backends.python.attendant import LONGEST_DELAY, Attendant, pause_after
from inferd.server.engine.loading import endings
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.errors import Unavailable
from tests.backends.python.served import CONFIG, MISCHIEF, Readiness, add_model, ask, serving, wait_for
from tests.engine.serving import Pending, infer_all, poll, request, row
from tests.waiting import until

UNAVAILABLE = 14
EXPLICIT = ModelControl(ControlMode.EXPLICIT, (ALL,))
ENDS = {-1: "SIGKILL", -2: "SIGSEGV", -3: "exited with status 3"}


def workers() -> list[psutil.Process]:
    """The worker processes of this process that live."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            if child.status() != psutil.STATUS_ZOMBIE and "worker/__main__.py" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("value", ENDS)
async def test_a_dead_worker_is_told_and_replaced(tmp_path, value):
    async with serving(tmp_path, m=MISCHIEF, other=MISCHIEF) as engine:
        readiness = Readiness(engine)
        answer = await ask(engine, value)
        assert answer.status == UNAVAILABLE
        assert "Failed to process the request(s) for model 'm_0_0', message: its worker process" in answer.text
        assert ENDS[value] in answer.text
        assert (await ask(engine, 5, model="other")).array().tolist() == [[5]]
        assert (await ask(engine, 6)).array().tolist() == [[6]]  # waits for the next worker
        await readiness.until(("m", False), ("m", True))


async def test_requests_that_wait_survive_the_death_of_the_worker(tmp_path):
    async with serving(tmp_path, m=MISCHIEF) as engine:
        answers = await infer_all(engine, *(request(x=row(value)) for value in (1, -1, 2, 3)))
        assert [answer.status for answer in answers] == [0, UNAVAILABLE, 0, 0]


async def test_a_crash_loop_backs_off_and_refuses_at_once(tmp_path):
    async with serving(tmp_path, m=MISCHIEF) as engine:
        readiness = Readiness(engine)
        assert (await ask(engine, -1)).status == UNAVAILABLE
        assert (await ask(engine, -1)).status == UNAVAILABLE
        answer = await ask(engine, 1)  # the third worker is not started yet
        assert answer.status == UNAVAILABLE
        await readiness.until(*[("m", False), ("m", True)] * 2)
        assert (await ask(engine, 1)).status == 0


def test_a_model_that_fails_for_weeks_is_still_tried():
    assert [pause_after(failures) for failures in (0, 1, 2, 3, 4)] == [0, 0, 0.5, 1, 2]
    assert {pause_after(failures) for failures in (8, 1_000, 10**9)} == {LONGEST_DELAY}


async def test_a_broken_instance_takes_nothing_from_one_that_works(tmp_path):
    code = f"""
    import os, pathlib
    import triton_python_backend_utils as pb_utils
    flag = pathlib.Path({str(tmp_path / "flag")!r})
    class TritonPythonModel:
        def initialize(self, args):
            self.fails = args["model_instance_name"] == "m_0_1"
            assert not (self.fails and flag.exists())
        def execute(self, requests):
            if self.fails:
                flag.touch()
                os._exit(1)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
    """
    add_model(tmp_path, "m", code, CONFIG.replace("count: 1", "count: 2"))
    async with serving(tmp_path) as engine:
        first = []
        while UNAVAILABLE not in first:
            first += [answer.status for answer in await infer_all(engine, *[request(x=row(1))] * 20)]
        assert first.count(UNAVAILABLE) == 1
        assert engine.model("m").ready
        answers = await infer_all(engine, *[request(x=row(1))] * 20)
        assert {answer.status for answer in answers} == {0}


@pytest.mark.parametrize("value", [-4, -6])
async def test_an_execution_that_hangs_is_ended(tmp_path, value):
    add_model(
        tmp_path, "m", MISCHIEF,
        CONFIG + 'parameters { key: "EXECUTION_TIMEOUT_SECONDS" value { string_value: "1" } }',
    )  # fmt: skip
    async with serving(tmp_path) as engine:
        answer = await ask(engine, value)
        assert answer.status == UNAVAILABLE
        assert "took longer than 1 s" in answer.text
        async with asyncio.timeout(60):
            while (await ask(engine, 1)).status:  # noqa: ASYNC110 - on a busy machine, it may take longer than 1 s, too
                await asyncio.sleep(0.05)


async def test_an_exception_fails_its_batch_only(tmp_path):
    async with serving(tmp_path, m=MISCHIEF) as engine:
        process = workers()
        answer = await ask(engine, -5)
        assert answer.status == 13
        assert "Failed to process the request(s) for model 'm_0_0', message: ValueError: a mistake of the model" in (
            answer.text
        )
        assert (await ask(engine, -9)).status == 13
        assert "MemoryError" in (await ask(engine, -9)).text
        assert (await ask(engine, 1)).status == 0
        assert workers() == process


async def test_a_worker_that_closes_its_socket_is_replaced(tmp_path):
    async with serving(tmp_path, m=MISCHIEF) as engine:
        assert (await ask(engine, -7)).status == UNAVAILABLE
        assert (await ask(engine, 1)).status == 0


async def test_garbage_on_standard_output_is_logged_and_limited(tmp_path, caplog):
    caplog.set_level(logging.INFO, "inferd.python")
    async with serving(tmp_path, m=MISCHIEF) as engine:
        assert (await ask(engine, -8)).status == 0
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("m_0_0: ") and "\\xff" in text for text in said)
    assert any("left out" in text for text in said)


async def test_large_outputs_come_back_whole(tmp_path):
    async with serving(tmp_path, m=MISCHIEF) as engine:
        for _ in range(2):
            assert (await ask(engine, -10)).array().shape == (40_000_000,)
        x = np.arange(300_000).reshape(1, -1)
        answer = await infer_all(engine, request(x=x))
        assert (answer[0].array() == x).all()


async def test_a_model_that_does_not_load_says_why(tmp_path, caplog):
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            raise RuntimeError("no weights here")
        def execute(self, requests):
            return []
    """
    async with serving(tmp_path, problems=1, m=code) as engine:
        [entry] = engine.index()
        assert entry.state == "UNAVAILABLE"
        assert "no weights here" in entry.reason
        assert "m_0_0" in entry.reason
    assert workers() == []


async def test_a_worker_that_dies_while_it_loads_is_told(tmp_path):
    async with serving(tmp_path, problems=1, m="import os\nos._exit(7)\n") as engine:
        [entry] = engine.index()
        assert "exited with status 7" in entry.reason


async def test_is_ready_of_the_model_is_asked(tmp_path):
    code = """
    import pathlib, os
    class TritonPythonModel:
        def initialize(self, args):
            self.flag = pathlib.Path(args["model_repository"]) / "ready"
        def is_ready(self):
            return self.flag.exists()
        def execute(self, requests):
            return []
    """
    async with serving(tmp_path, m=code) as engine:
        assert not await engine.model("m").check()
        assert not await engine.check()
        (tmp_path / "m" / "ready").touch()
        assert await asyncio.gather(*(engine.model("m").check() for _ in range(10))) == [True] * 10
        assert await engine.check()


async def test_who_asks_a_model_that_thinks_for_ever_leaves_nothing_behind(tmp_path):
    code = """
    import time
    class TritonPythonModel:
        def is_ready(self):
            time.sleep(3600)
        def execute(self, requests):
            return []
    """
    async with serving(tmp_path, m=code) as engine:
        [instance] = engine.model("m")._instances.live
        left = []
        for _ in range(3):
            asked = instance.check()
            left.append(weakref.ref(asked))
            asked.cancel()
        del asked
        gc.collect()
        assert [each() for each in left] == [None] * 3


async def test_the_model_is_finalized(tmp_path):
    code = f"""
    import pathlib
    class TritonPythonModel:
        def execute(self, requests):
            return []
        def finalize(self):
            pathlib.Path({str(tmp_path / "finalized")!r}).write_text("yes")
    """
    async with serving(tmp_path, m=code):
        pass
    assert (tmp_path / "finalized").read_text() == "yes"


async def test_children_of_a_worker_end_with_it(tmp_path):
    code = f"""
    import pathlib, subprocess
    class TritonPythonModel:
        def initialize(self, args):
            child = subprocess.Popen(["sleep", "3600"])
            pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
        def execute(self, requests):
            return []
    """
    async with serving(tmp_path, m=code):
        child = psutil.Process(int((tmp_path / "child").read_text()))
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


# Runs a program whose processes cannot become subreapers (EINVAL), as under qemu-user.
EMULATED = """
import ctypes, os, platform, struct, sys

prctl = {"x86_64": 157, "aarch64": 167}[platform.machine()]
steps = [
    (0x20, 0, 0, 0), (0x15, 0, 3, prctl),  # another system call is allowed
    (0x20, 0, 0, 16), (0x15, 0, 1, 36),  # another operation than PR_SET_CHILD_SUBREAPER, too
    (0x06, 0, 0, 0x00050000 | 22), (0x06, 0, 0, 0x7FFF0000),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")
def test_orphans_of_a_worker_end_with_it_where_nobody_can_adopt_them(tmp_path):
    """Guards models under an emulator, in which supervisors are no subreapers."""
    code = f"""
    import pathlib, subprocess
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            subprocess.run(["sh", "-c", "sleep 3600 & echo $! > {tmp_path}/orphan"])
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
    """
    add_model(tmp_path / "models", "m", code)
    port = free_port()
    command = [sys.executable, "-c", EMULATED, sys.executable, "-m", "inferd", "serve"]
    command += ["--model-repository", tmp_path / "models", "--grpc-port", str(port)]
    server = ServerProcess(command, port, log=tmp_path / "log")
    try:
        orphan = psutil.Process(int((tmp_path / "orphan").read_text()))
        given = triton.InferInput("x", [1, 2], "INT64").set_data_from_numpy(np.array([[3, 4]]))
        with triton.InferenceServerClient(server.address) as client:
            assert client.infer("m", [given]).as_numpy("y").tolist() == [[3, 4]]
    finally:
        assert server.stop() == 0
    psutil.wait_procs([orphan], timeout=30)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


async def test_shared_memory_has_no_name_that_could_be_left_behind(tmp_path):
    async with serving(tmp_path, m=MISCHIEF) as engine:
        await ask(engine, *range(100_000))
        for process in (psutil.Process(), *workers()):
            assert not [mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm")]


async def test_arguments_of_initialize(tmp_path):
    code = f"""
    import json, pathlib
    class TritonPythonModel:
        def initialize(self, args):
            pathlib.Path({str(tmp_path / "args")!r}).write_text(json.dumps(args))
        def execute(self, requests):
            return []
    """
    async with serving(tmp_path, m=code):
        pass
    args = json.loads((tmp_path / "args").read_text())
    config = json.loads(args.pop("model_config"))
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert config["max_batch_size"] == 8
    assert config["input"][0]["dims"] == [-1]
    assert config["input"][0]["data_type"] == "TYPE_INT64"


async def test_a_model_may_look_for_leaks_of_shared_memory(tmp_path):
    """The model does what models in Triton's own tests do."""
    code = MISCHIEF.replace(
        "    def execute(",
        """    def initialize(self, args):
        import c_python_backend_utils as c_utils
        self.free = c_utils.shared_memory.free_memory()
        assert self.free == pb_utils.shared_memory.free_memory()
    def execute(""",
    )
    async with serving(tmp_path, m=code) as engine:
        assert (await ask(engine, 1)).status == 0


async def test_a_wake_up_does_not_cut_off_finalize(tmp_path):
    """The attendant is told of the retirement and of the end; the second wake-up may come while the model finalizes."""
    code = """
    import pathlib, time
    class TritonPythonModel:
        def initialize(self, args):
            self.folder = pathlib.Path(args["model_repository"])
        def execute(self, requests):
            pass
        def finalize(self):
            (self.folder / "finalizing").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.001)
            (self.folder / "finalized").touch()
    """
    async with serving(tmp_path, control=EXPLICIT, m=code) as engine:
        [attendant] = [each for each in gc.get_objects() if type(each) is Attendant and each.up]
        [worker] = workers()
        await engine.unload("m")
        await asyncio.to_thread(wait_for, tmp_path / "m" / "finalizing")
        attendant.link.nudge()
        with pytest.raises(psutil.TimeoutExpired):  # killed, it would end at once
            await asyncio.to_thread(worker.wait, 0.5)
        (tmp_path / "m" / "go").touch()
        await asyncio.to_thread(worker.wait, 30)
        assert (tmp_path / "m" / "finalized").exists()


HANGING = """
import pathlib, time
class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
    def execute(self, requests):
        (self.folder / "executing").touch()
        time.sleep(3600)
"""


async def hang(engine, root) -> Pending:
    """A request that the model executes for ever; it is being executed."""
    pending = Pending(engine, request(x=row(1)))
    await asyncio.to_thread(wait_for, root / "m" / "executing")
    (root / "m" / "executing").unlink()
    return pending


async def test_what_an_unloaded_model_executes_for_nobody_is_ended(tmp_path, caplog):
    """An execution that hangs keeps its worker while somebody waits for it, and stub-timeout-seconds after that."""
    async with serving(tmp_path, {"stub-timeout-seconds": "1"}, control=EXPLICIT, m=HANGING) as engine:
        pending = await hang(engine, tmp_path)
        await engine.unload("m")
        [worker] = workers()
        with pytest.raises(psutil.TimeoutExpired):  # somebody waits
            await asyncio.to_thread(worker.wait, 1.5)
        pending.ticket.cancel()
        await asyncio.to_thread(worker.wait, 30)
        await until(lambda: [entry.state for entry in engine.index()] == ["UNAVAILABLE"])
        assert "all its requests have been given up" in caplog.text
        await engine.load("m")
        assert len(workers()) == 1


async def test_a_load_behind_models_that_hang_names_their_processes(tmp_path, monkeypatch):
    """As long as the processes live, the index does not say that the model is gone, either."""
    monkeypatch.setattr(endings, "LOOK_SECONDS", 0.1)
    async with serving(tmp_path, {"stub-timeout-seconds": "1"}, control=EXPLICIT, m=HANGING) as engine:
        waiting = []
        for _ in range(endings.MOST_REPLACED):
            waiting.append(await hang(engine, tmp_path))
            await engine.unload("m")
            pids = {worker.pid for worker in workers()}
            if len(waiting) < endings.MOST_REPLACED:
                await engine.load("m")
        with pytest.raises(Unavailable) as refused:
            await engine.load("m")
        assert {int(pid) for pid in re.findall(r"m_0_0 \(process (\d+)\)", str(refused.value))} == pids
        await engine.unload("m")
        assert [entry.state for entry in engine.index()] == ["UNLOADING"]
        for each in waiting:
            each.ticket.cancel()
        await until(lambda: [entry.state for entry in engine.index()] == ["UNAVAILABLE"])
        assert workers() == []


async def test_a_change_that_waits_for_models_that_hang_is_told_once(tmp_path, caplog):
    """The polling of the repository goes on, too: it finds the changes of other models."""
    control = ModelControl(ControlMode.POLL, poll_seconds=3600)
    async with serving(tmp_path, {"stub-timeout-seconds": "1"}, control=control, m=HANGING) as engine:
        waiting = []
        try:
            for number in range(endings.MOST_REPLACED + 1):
                waiting.append(await hang(engine, tmp_path))
                (tmp_path / "m" / "1" / "model.py").write_text(f"{HANGING}# {number}")
                await poll(engine)
            add_model(tmp_path, "n", MISCHIEF)
            await poll(engine)
            assert (await ask(engine, 1, model="n")).status == 0
            assert caplog.text.count("what has changed waits for one of them") == 1
        finally:
            for each in waiting:
                each.ticket.cancel()


@pytest.mark.parametrize("method", ["initialize(self, args)", "auto_complete_config(config)"])
async def test_a_load_that_hangs_is_ended_after_its_time(tmp_path, monkeypatch, caplog, method):
    monkeypatch.setattr(process, "LOADS_LONG", 0.2)
    code = f"import time\nclass TritonPythonModel:\n    def {method}:\n        time.sleep(3600)\n"
    async with serving(tmp_path, {"load-timeout-seconds": "1"}, problems=1, m=code) as engine:
        assert re.search(r"worker process \d+ did not load the model within 1 s \(load-timeout-seconds\)",
                         engine.problems["m"])  # fmt: skip
    assert re.search(r"its worker process \d+ has loaded the model for 0\.2 s", caplog.text)
    assert workers() == []


async def test_a_supervisor_that_hangs_when_it_starts_fails_the_load_alone(tmp_path, monkeypatch):
    hangs = tmp_path / "supervisor.py"
    hangs.write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(process, "SUPERVISOR", hangs)
    (tmp_path / "models").mkdir()
    async with serving(tmp_path / "models", {"stub-timeout-seconds": "1"}, problems=1, m=MISCHIEF) as engine:
        assert "its supervisor did not start within 1 s" in engine.problems["m"]


async def test_a_worker_that_breaks_a_rule_while_it_loads_is_ended(tmp_path):
    code = """
    import time
    from inferd_worker import runtime
    class TritonPythonModel:
        def initialize(self, args):
            runtime.current().channel._link.work.send(b"short")
            time.sleep(3600)
    """
    async with serving(tmp_path, problems=1, m=code) as engine:
        assert engine.problems["m"].endswith("its worker was ended because it sent a packet without a head")


async def test_an_error_of_the_worker_itself_is_told_as_the_end_of_a_program(tmp_path, caplog):
    """Not as that of a process which the server has killed, as it does with one that only closes its sockets."""
    caplog.set_level(logging.INFO, "inferd.python")
    code = (
        MISCHIEF
        + """
import ctypes
from inferd_worker import worker
library = ctypes.CDLL(None)
library.__cxa_atexit(library.pause, None, None)  # the process stays when the interpreter has ended
worker.Worker._execute_readable = worker.Worker._write_responses = lambda *_: 1 // 0
"""
    )
    async with serving(tmp_path, m=code) as engine:
        assert (await ask(engine, 1)).text.endswith("its worker process exited with status 1")
    assert "ZeroDivisionError" in caplog.text


async def test_a_long_line_of_output_becomes_several(tmp_path, caplog):
    caplog.set_level(logging.INFO, "inferd.python")
    code = MISCHIEF + 'for size in (8192, 30000, 70000):\n    os.write(1, b"y" * size + b"\\n")\n'
    async with serving(tmp_path, m=code):
        pass
    lines = [len(record.getMessage()) - len("m_0_0: ") for record in caplog.records if "yy" in record.getMessage()]
    assert lines == [8192, 8192, 8192, 8192, 5424, *[8192] * 8, 4464]


async def test_a_question_for_which_no_thread_can_be_made_disturbs_no_later_one(tmp_path):
    code = """
    import pathlib, threading
    start = threading.Thread.start
    def refuse(thread):
        if thread.name == "inferd-is-ready":
            threading.Thread.start = start
            raise RuntimeError("can't start new thread")
        start(thread)
    threading.Thread.start = refuse
    class TritonPythonModel:
        def is_ready(self):
            return True
        def execute(self, requests):
            return []
    """
    async with serving(tmp_path, m=code) as engine:
        assert [await engine.model("m").check() for _ in range(2)] == [False, True]
