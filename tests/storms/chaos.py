"""Workers of Python models are killed, stopped and made to misbehave under load.

    python -m tests.storms.chaos                two minutes, as `make soak` does
    python -m tests.storms.chaos --seconds 10
    tools/sanitize.sh asan -m tests.storms.chaos --instrumented

Four models are served: `wild`, whose workers get SIGKILL and SIGSTOP at random and whose code raises, exits, hangs,
prints garbage and answers with too much, as its inputs say; `caller`, which passes each request on to `wild`, and whose
workers get the same signals; `mad`, whose workers send packets of all kinds at random instead of keeping to the
protocol; and `calm`, which is left in peace. The signals are for workers and for their supervisors. Every request must
get exactly one answer, the right one or an error; `calm` must never fail; no shared memory may have a name, since it
could outlive the server. Then the server itself is killed with SIGKILL, which must end its workers, too, and is started
again.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import psutil

from bench.processes import ServerProcess, free_port
from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.python.hostile import environment

PATH = "/inference.GRPCInferenceService/ModelInfer"
READY = "/inference.GRPCInferenceService/ModelReady"
SHARED_MEMORY = Path("/dev/shm")
REFUSED_PAUSE = 0.02  # seconds that a refused client waits
DEADLINE = 120.0  # seconds: a request that is not answered by then counts as lost, even on a busy machine
START, STOP = 600.0, 120.0  # seconds that the server may take, also in a sanitizer's build
# For a sanitizer's build, whose workers start slowly: with a shorter time, most signals would hit starting workers.
# Less than DEADLINE: requests wait while a worker that starts is stopped.
PATIENT = ("--backend-config", "python,stub-timeout-seconds=60")

MODEL = """
import os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        what = int(x.flat[0])
        if what == -1:
            raise ValueError("on purpose")
        if what == -2:
            os._exit(7)
        if what == -3:
            time.sleep(3600)
        if what == -4:
            print("\\0\\xff" * 10000)
        if what == -5:
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 3_000_000), np.int64))])
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""

CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        call = pb_utils.InferenceRequest(
            model_name="wild", requested_output_names=["y"], inputs=[pb_utils.get_input_tensor_by_name(request, "x")]
        )
        response = call.exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        return response
"""

CONFIG = """
backend: "python"
max_batch_size: 16
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: COUNT }
dynamic_batching { }
"""
# Only for models that hang on purpose: the others must not depend on the machine's speed.
LIMIT = 'parameters { key: "EXECUTION_TIMEOUT_SECONDS" value { string_value: "1" } }\n'


@dataclass
class Tally:
    """The outcomes of requests."""

    asked: int = 0
    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    texts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Held:
    """Samples of the memory that the server holds."""

    descriptors: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes of its own, without what it shares with workers
    shared: list[int] = field(default_factory=list)  # bytes of the arenas

    def look(self, server: ServerProcess) -> None:
        """Once more."""
        process = psutil.Process(server.pid)
        found = process.memory_info()
        self.descriptors.append(process.num_fds())
        self.memory.append(found.rss - found.shared)
        self.shared.append(found.shared)

    def say(self) -> str:
        """The most in the first and in the last third."""
        third = max(1, len(self.memory) // 3)
        out = []
        for name, values, unit in (
            ("descriptors", self.descriptors, 1),
            ("MB of its own", self.memory, 1 << 20),
            ("MB shared", self.shared, 1 << 20),
        ):
            out.append(f"{max(values[:third]) // unit} then {max(values[-third:]) // unit} {name}")
        return ", ".join(out)


def write_models(folder: Path) -> Path:
    """The repository."""
    # Pauses grow before a worker that dies repeatedly is restarted: with more instances, some are up.
    hostile = environment(folder / "mad" / "environment", "worker.storm(os.getpid(), 0.999)", again=True)
    for name, code, count in (("wild", MODEL, 4), ("calm", MODEL, 2), ("caller", CALLER, 2), ("mad", MODEL, 4)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        config = CONFIG.replace("COUNT", str(count)) + (LIMIT if name != "calm" else "")
        if name == "mad":
            config += f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{hostile}" }} }}'
        (folder / name / "config.pbtxt").write_text(config)
    return folder


def start(repository: Path, log: Path, instrumented: bool) -> ServerProcess:
    """The server, from this source tree."""
    port = free_port()
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", repository, "--grpc-port", str(port)]
    command += PATIENT if instrumented else ()
    root = str(Path(__file__).parents[2])
    return ServerProcess(command, port, log=log, env={"PYTHONPATH": root}, patience=START)


def workers(server: ServerProcess, model: str = "") -> list[psutil.Process]:
    """The worker processes of a model's instances, or of all."""
    found = []
    for process in server.processes()[1:]:
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if command and command[-1].startswith(model) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def message(model: str, x: np.ndarray) -> bytes:
    """A request with one row."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="INT64", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    return request.SerializeToString()


async def ask(channel: grpc.aio.Channel, model: str, x: np.ndarray, tally: Tally) -> None:
    """Make one request and count its outcome."""
    tally.asked += 1
    try:
        data = await channel.unary_unary(PATH, None, None)(message(model, x), timeout=DEADLINE)
    except grpc.aio.AioRpcError as error:
        tally.answers[error.code().name] += 1
        tally.texts[str(error.details())] += 1
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await asyncio.sleep(REFUSED_PAUSE)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            tally.wrong.append(f"{model}: a request got no answer in {DEADLINE:g} s")
        return
    tally.answers["OK"] += 1
    answer = pb.ModelInferResponse.FromString(data)
    if model != "mad" and x.flat[0] != -5 and answer.raw_output_contents[0] != x.tobytes():
        tally.wrong.append(f"{model}: a wrong answer")


async def load(address: str, model: str, until: float, seed: int, tally: Tally) -> None:
    """One client: request after request, on a connection of its own.

    It continues after `until` while the model has answered nothing: workers may start slowly on a busy machine.
    """
    chance = random.Random(seed)
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        while (now := time.monotonic()) < until or (not tally.answers["OK"] and now < until + DEADLINE):
            size = chance.choice((1, 4, 64, 3000, 100_000))
            x = np.arange(size, dtype=np.int64).reshape(1, -1) + seed
            if model in ("wild", "caller") and chance.random() < 0.0005:
                x[0, 0] = -chance.randrange(1, 6)
            await ask(channel, model, x, tally)


async def torment(server: ServerProcess, until: float, seed: int, held: Held) -> int:
    """Signal workers of `wild`, sometimes of `caller`, at random; sample the memory; return the number of signals."""
    chance = random.Random(seed)
    count = 0
    while time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0.2, 3.0))
        held.look(server)
        found = await asyncio.to_thread(workers, server, chance.choice(("wild", "wild", "wild", "caller")))
        if found:
            with contextlib.suppress(psutil.Error):
                chance.choice(found).send_signal(chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
                count += 1
    return count


async def run_load(server: ServerProcess, seconds: float, seed: int, held: Held) -> tuple[dict[str, Tally], int]:
    """Run the models under load and signals; return the clients' outcomes and the number of signals."""
    tallies = {"wild": Tally(), "caller": Tally(), "calm": Tally(), "mad": Tally()}
    until = time.monotonic() + seconds
    clients = []
    for index, model in enumerate(("wild", "wild", "wild", "wild", "caller", "caller", "calm", "calm", "mad")):
        clients.append(load(server.address, model, until, seed + index, tallies[model]))
    *_, signals = await asyncio.gather(*clients, torment(server, until - 1, seed, held))
    return tallies, signals


def faults(tallies: dict[str, Tally]) -> list[str]:
    """The faults in the clients' outcomes."""
    wrong = []
    for model, tally in tallies.items():
        wrong += tally.wrong
        if tally.asked != tally.answers.total():
            wrong.append(f"{model}: a request has not got exactly one answer")
        if not tally.answers["OK"]:
            wrong.append(f"{model} has answered nothing")
    calm = tallies["calm"]
    if calm.answers["OK"] != calm.asked:
        wrong.append(f"the untouched model has failed requests: {dict(calm.answers)}, {dict(calm.texts)}")
    return wrong


def gone(processes: list[psutil.Process], patience: float = 60.0) -> bool:
    """Whether these processes end soon."""
    _, alive = psutil.wait_procs(processes, timeout=patience)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive if process.is_running())


def named_memory(server: ServerProcess) -> set[str]:
    """Shared memory of the server and its workers that has a name in a file system, where it could be left behind."""
    found = set()
    for process in server.processes():
        with contextlib.suppress(psutil.Error, OSError):
            found |= {mapped.path for mapped in process.memory_maps() if mapped.path.startswith(str(SHARED_MEMORY))}
    return found


def run(seconds: float, seed: int, instrumented: bool = False) -> list[str]:
    """Run everything; return the faults, in sentences."""
    folder = Path(tempfile.mkdtemp(prefix="inferd-chaos-"))
    wrong: list[str] = []
    try:
        repository = write_models(folder / "models")
        server = start(repository, folder / "log", instrumented)
        try:
            held = Held()
            tallies, signals = asyncio.run(run_load(server, seconds, seed, held))
            for model, tally in tallies.items():
                print(f"{model}: {tally.asked} requests, {dict(tally.answers)}", flush=True)
            print(f"{signals} signals; the server held at most {held.say()}", flush=True)
            wrong += faults(tallies)
            if named_memory(server):
                wrong.append(f"memory that would be left behind: {', '.join(sorted(named_memory(server)))}")
            mine = workers(server)
            os.kill(server.pid, signal.SIGKILL)
            if not gone(mine):
                wrong.append("workers have outlived the server")
        finally:
            server.stop()
        wrong += run_again(repository, folder / "again", instrumented)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return wrong


def run_again(repository: Path, log: Path, instrumented: bool) -> list[str]:
    """Check that a server started after the kill serves, and that its workers end with it."""
    server = start(repository, log, instrumented)
    tally = Tally()
    try:
        asyncio.run(load(server.address, "calm", time.monotonic() + 1, 1, tally))
        mine = workers(server)
    finally:
        status = server.stop(STOP)
    wrong = [] if tally.answers["OK"] == tally.asked else [f"after the restart: {dict(tally.answers)}"]
    if status != 0:
        wrong.append(f"the server ended with {status}")
    if not gone(mine):
        wrong.append("workers have outlived a server that was stopped")
    return wrong


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instrumented", action="store_true", help="the server is slow: its workers may start slowly")
    arguments = parser.parse_args()
    wrong = run(arguments.seconds, arguments.seed, arguments.instrumented)
    for sentence in dict.fromkeys(wrong):
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
