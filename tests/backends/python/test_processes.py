"""Workers and all that they start end with the server, and no sooner, whatever signals come."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from inferd.backends.python import attendant, process
from inferd.server.engine.loading.control import ControlMode, ModelControl
from tests.backends.python.served import CONFIG, MISCHIEF, WAITING, Readiness, add_model, ask, serving, wait_for

UNAVAILABLE = 14

# Starts processes in every way that is known, and writes down their numbers.
FAMILY = """
import os, pathlib, subprocess, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

DAEMON = (
    "import os, time\\n"
    "if os.fork(): os._exit(0)\\n"
    "os.setsid()\\n"
    "print(os.getpid(), flush=True)\\n"
    "time.sleep(3600)"
)

class TritonPythonModel:
    def initialize(self, args):
        plain = subprocess.Popen(["sleep", "3600"])
        session = subprocess.Popen(["sleep", "3600"], start_new_session=True, env={})
        forked = os.fork()
        if not forked:
            time.sleep(3600)
        daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, close_fds=False)
        number = int(daemon.stdout.readline())
        daemon.wait()
        numbers = [os.getpid(), plain.pid, session.pid, forked, number]
        path = pathlib.Path(args["model_repository"]) / "family"
        path.with_suffix(".new").write_text(" ".join(map(str, numbers)))
        path.with_suffix(".new").rename(path)
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy().flat[0] < 0:
            os._exit(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def family(root):
    """The worker and what it has started: they live."""
    numbers = (root / "m" / "family").read_text().split()
    assert len(numbers) == 5
    return [psutil.Process(int(number)) for number in numbers]


def all_end(processes):
    """Whether they do, soon."""
    for each in processes:
        try:
            each.wait(30)
        except psutil.TimeoutExpired:
            return each.status() == psutil.STATUS_ZOMBIE
    return True


async def test_what_a_worker_has_started_ends_when_the_model_is_unloaded(tmp_path):
    async with serving(tmp_path, m=FAMILY):
        mine = family(tmp_path)
        assert all(each.is_running() for each in mine)
    assert not any(each.is_running() for each in mine)


async def test_what_a_worker_has_started_ends_with_it(tmp_path):
    async with serving(tmp_path, m=FAMILY) as engine:
        mine = family(tmp_path)
        assert (await ask(engine, -1)).status == UNAVAILABLE
        assert not any(each.is_running() for each in mine)
        assert (await ask(engine, 1)).status == 0


SERVER = """
import asyncio, pathlib, sys
from tests.backends.python.served import serving
async def main():
    async with serving(pathlib.Path(sys.argv[1])):
        print("serving", flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_what_a_worker_has_started_ends_with_a_server_that_is_killed(tmp_path):
    add_model(tmp_path, "m", FAMILY)
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert server.stdout.readline() == b"serving\n"
        mine = [*family(tmp_path), *psutil.Process(server.pid).children()]
        assert len(mine) > 5
    finally:
        server.kill()
        server.communicate()
    assert all_end(mine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_for_all_processes_of_a_service_do_not_end_workers(tmp_path, number):
    before = children()
    async with serving(tmp_path, m=WAITING) as engine:
        asked = asyncio.ensure_future(ask(engine, 7))
        await asyncio.to_thread(wait_for, tmp_path / "m" / "executing")
        theirs = children() - before  # servers of other tests may be children of this process too
        assert len(theirs) >= 2
        for pid in theirs:
            with contextlib.suppress(ProcessLookupError):  # one that has ended by itself
                os.kill(pid, number)
        (tmp_path / "m" / "go").touch()
        assert (await asked).array().tolist() == [[7]]


NOISY = """
import subprocess
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.noise = subprocess.Popen(["yes"], start_new_session=True)
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy().flat[0] < 0:
            import os
            os._exit(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


async def test_output_without_end_keeps_no_worker_from_ending(tmp_path):
    async with serving(tmp_path, m=NOISY) as engine:
        assert (await ask(engine, -1)).status == UNAVAILABLE
        assert (await asyncio.wait_for(ask(engine, 1), 60)).status == 0
    assert [pid for pid in children() if name_of(pid) == "yes"] == []


def name_of(pid):
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""


def children():
    return {each.pid for each in psutil.Process().children(recursive=True)}


async def test_a_worker_that_cannot_be_watched_is_not_left_behind(tmp_path, monkeypatch):
    def refuse(pid):
        raise OSError(24, "Too many open files")

    before = children()
    monkeypatch.setattr(process.os, "pidfd_open", refuse)
    async with serving(tmp_path, problems=1, m=MISCHIEF) as engine:
        [entry] = engine.index()
        assert "Too many open files: the server has reached its limit of" in entry.reason
        assert children() <= before


@pytest.mark.parametrize("ready", [b"no JSON", b"[" * 50_000, b"7", b"null"])
@pytest.mark.parametrize("mode", ["serve", "complete"])
async def test_a_worker_that_says_nonsense_when_it_is_ready_is_ended(tmp_path, ready, mode):
    method = "auto_complete_config" if mode == "complete" else "initialize"
    code = f"""
    import os, struct, time
    class TritonPythonModel:
        @staticmethod
        def {method}(*_):
            os.write(3, struct.pack("<BBHIQQ", 16, 0, 0, {len(ready)}, 0, 0) + {ready!r})
            time.sleep(3600)
    """
    add_model(tmp_path, "m", code, CONFIG)
    before = children()
    async with serving(tmp_path, problems=1) as engine:
        [entry] = engine.index()
        assert "cannot be read as a JSON object" in entry.reason or "did not" in entry.reason
    assert children() <= before


async def test_a_question_whether_the_model_is_ready_outlives_no_worker(tmp_path):
    """Asked when its worker is gone, the model is not ready; asked later, it is."""
    code = MISCHIEF + "\n    def is_ready(self):\n        return True\n"
    async with serving(tmp_path, m=code) as engine:
        readiness = Readiness(engine)
        [instance] = engine.model("m")._instances.live
        for _ in range(2):  # after the second end the next worker is started later
            assert (await ask(engine, -3)).status == UNAVAILABLE
        assert await asyncio.wait_for(asyncio.wrap_future(instance.check()), 60) is False
        await readiness.until(*[("m", False), ("m", True)] * 2)
        assert await engine.model("m").check()


async def test_a_request_that_comes_while_the_worker_restarts_is_told_so(tmp_path, monkeypatch):
    """Unlike the request that ended the worker, this request has not reached it."""
    monkeypatch.setattr(attendant, "pause_after", lambda failures: 3600.0)
    async with serving(tmp_path, m=MISCHIEF) as engine:
        guilty, late = [await ask(engine, number) for number in (-3, 1)]
    assert [answer.status for answer in (guilty, late)] == [UNAVAILABLE] * 2
    assert "restarting" not in guilty.text
    assert late.text == f"{guilty.text}; the worker is restarting, and no worker has received this request"


async def test_a_load_that_lowers_the_number_of_instances_returns_when_the_others_are_finalized(tmp_path):
    """Guards what clients of such a load rely on: what the removed instances held is free."""
    code = MISCHIEF + (
        "    def initialize(self, args):\n"
        "        self.file = args['model_repository'] + '/finalized ' + args['model_instance_name']\n"
        "    def finalize(self):\n"
        "        open(self.file, 'w').close()\n"
    )
    add_model(tmp_path, "m", code, CONFIG.replace("count: 1", "count: 3"))
    control = ModelControl(mode=ControlMode.EXPLICIT, load=("m",))
    async with serving(tmp_path, control=control) as engine:
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
        await engine.load("m")
        assert len(list((tmp_path / "m").glob("finalized *"))) == 2


FEW_DESCRIPTORS = """
import os, resource
from inferd.backends.python._spawn import spawn
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
raise SystemExit(os.waitpid(spawn("/bin/true", ["true"], {}, "/", [0, 1, 2]), 0)[1])
"""


def test_a_low_limit_of_open_files_leaves_room_for_workers():
    """Guards that a process is started where few files may be open, of which it needs as few."""
    subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], check=True, timeout=120)


FORKS_AT_THE_LIMIT = """
import os, threading
import numpy as np
import triton_python_backend_utils as pb_utils
start = threading.Thread.start

def refuse(thread):
    if thread.name == "inferd-fork":
        raise RuntimeError("can't start new thread")
    start(thread)

class TritonPythonModel:
    def execute(self, requests):
        threading.Thread.start = refuse
        fork = os.fork()
        if not fork:
            try:
                pb_utils.Logger.log_info("from the fork")
            except pb_utils.TritonModelException:
                os._exit(7)
            os._exit(0)
        threading.Thread.start = start
        y = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[y]], np.int64))])]
"""


async def test_a_fork_whose_parent_can_make_no_thread_gets_an_error(tmp_path):
    async with serving(tmp_path, m=FORKS_AT_THE_LIMIT) as engine:
        assert (await ask(engine, 1)).array().tolist() == [[7]]
