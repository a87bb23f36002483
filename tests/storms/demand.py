"""Loading on demand under a storm: ensembles over shared steps, and a memory budget for a third of these.

    python -m tests.storms.demand                the storm of five minutes that `make soak` has
    python -m tests.storms.demand --seconds 20

50 ensembles of two to four steps share 20 models, of which the budget has room for seven. Clients ask for any of them,
with deadlines and without, while others unload models by hand. What must hold:

    wrong     0   a request is answered with its own tensor, or DEADLINE_EXCEEDED after its own deadline: all models fit
    waiting   0   no request without a deadline waits longer than a minute
    late      0   no model takes 30 s to unload: its accepted requests wait for none that waits for its unload
    over      0   whenever the index is read, the models in it that are not UNAVAILABLE fit into the budget
    apart     0   at the end the index, the statistics and ModelReady name the same models, and each ensemble answers
    live      0   native objects that are left when the server has stopped

The summary is printed as JSON; the exit status is 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from bench import inferd
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd_client.pb import grpc_service_pb2 as pb
from tests.storms.soak import LIVE_LINE

SERVICE = "/inference.GRPCInferenceService/"
SIZE = 100_000  # bytes of each step's file
DEADLINES = (0.05, 0.2, 1.0, 5.0, 0.0, 0.0)  # seconds; 0: none
PATIENCE = 60.0
# A load takes as long as ten executions do.
STEP = Identity("", (("INT64", 1),), max_batch_size=8, parameters={"delay_us": "1000"})
WARM_UP = """
model_warmup { name: "some" batch_size: 1 count: 10
  inputs { key: "INPUT0" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } } }
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The repository, and the load."""

    seconds: float = 300.0
    steps: int = 20
    ensembles: int = 50
    share: float = 1 / 3  # of the steps for which the budget has room
    clients: int = 24
    unloads: int = 2  # clients that unload
    seed: int = 1

    @property
    def budget(self) -> int:
        return round(self.steps * self.share) * SIZE


@dataclass(slots=True)
class Outcome:
    """The outcome."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    unloads: int = 0
    looks: int = 0
    most_bytes: int = 0
    longest_wait: float = 0.0  # seconds of a request that was answered
    loads: int = 0


def ensemble(name: str, steps: Sequence[str]) -> str:
    """The configuration of an ensemble whose steps follow each other."""
    names = ["INPUT0", *(f"t{i}" for i in range(1, len(steps))), "OUTPUT0"]
    parts = ",".join(
        f'{{ model_name: "{step}" model_version: -1 input_map {{ key: "INPUT0" value: "{names[i]}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{names[i + 1]}" }} }}'
        for i, step in enumerate(steps)
    )
    return (
        f'name: "{name}" platform: "ensemble" max_batch_size: 8 '
        'input { name: "INPUT0" data_type: TYPE_INT64 dims: [ -1 ] } '
        'output { name: "OUTPUT0" data_type: TYPE_INT64 dims: [ -1 ] } '
        f"ensemble_scheduling {{ step [ {parts} ] }}\n"
    )


def make(folder: Path, plan: Plan) -> list[str]:
    """Write the repository; return the names of the models that clients call."""
    chosen = random.Random(plan.seed)
    steps = [f"step{i}" for i in range(plan.steps)]
    for name in steps:
        write(folder, [Identity(name, STEP.tensors, STEP.max_batch_size, parameters=STEP.parameters)])
        with (folder / name / "config.pbtxt").open("a") as config:
            config.write(WARM_UP)
        (folder / name / "1" / "weights").write_bytes(bytes(SIZE))
    ensembles = [f"ensemble{i}" for i in range(plan.ensembles)]
    for name in ensembles:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(ensemble(name, chosen.sample(steps, chosen.randint(2, 4))))
    return ensembles + steps


class Storm:
    """The clients of one server."""

    def __init__(self, address: str, plan: Plan, names: Sequence[str]) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._names = names
        self._address = address
        self._end = 0.0

    async def run(self) -> Outcome:
        """Send requests until the time is over, then check that all views of the server agree."""
        self._end = time.monotonic() + self._plan.seconds
        rngs = (random.Random(f"{self._plan.seed} {i}") for i in range(1000))
        async with grpc.aio.insecure_channel(self._address) as self._channel, asyncio.TaskGroup() as group:
            storm = [group.create_task(self._ask(next(rngs))) for _ in range(self._plan.clients)]
            storm += [group.create_task(self._unload(next(rngs))) for _ in range(self._plan.unloads)]
            watch = group.create_task(self._watch())
            await asyncio.wait(storm)
            watch.cancel()
            await self._agree()
        return self.outcome

    async def _call(self, method: str, message: Any, answer: Any, seconds: float = PATIENCE) -> Any:
        call = self._channel.unary_unary(SERVICE + method)
        return answer.FromString(await call(message.SerializeToString(), timeout=seconds))

    async def _ask(self, rng: random.Random) -> None:
        while time.monotonic() < self._end:
            await self._infer(rng.choice(self._names), rng.choice(DEADLINES), rng.getrandbits(60))

    async def _infer(self, name: str, deadline: float, value: int) -> None:
        """Send one request and record its faults."""
        raw = np.array([[value]], np.int64).tobytes()
        message = pb.ModelInferRequest(model_name=name, raw_input_contents=[raw])
        message.inputs.add(name="INPUT0", datatype="INT64", shape=[1, 1])
        begin = time.monotonic()
        status, text, found = "OK", "", b""
        try:
            answer = await self._call("ModelInfer", message, pb.ModelInferResponse, deadline or PATIENCE)
            found = answer.raw_output_contents[0]
        except grpc.aio.AioRpcError as error:
            status, text = error.code().name, error.details() or ""
        took = time.monotonic() - begin
        self.outcome.statuses[status] += 1
        if status == "OK":
            self.outcome.longest_wait = max(self.outcome.longest_wait, took)
            if found != raw:
                self.outcome.faults["wrong: the answer to another request"] += 1
        elif status == "DEADLINE_EXCEEDED" and deadline == 0:
            self.outcome.faults[f"waiting: a request without a deadline was not answered in {PATIENCE:g} s"] += 1
        elif status != "DEADLINE_EXCEEDED":
            self.outcome.faults[f"wrong: {status} {text}"] += 1
        elif took < deadline - 0.002:
            self.outcome.faults["wrong: a deadline before its time"] += 1

    async def _unload(self, rng: random.Random) -> None:
        while time.monotonic() < self._end:
            message = pb.RepositoryModelUnloadRequest(model_name=rng.choice(self._names))
            await self._call("RepositoryModelUnload", message, pb.RepositoryModelUnloadResponse)
            self.outcome.unloads += 1
            await asyncio.sleep(rng.uniform(0.02, 0.2))

    async def _index(self) -> dict[str, str]:
        answer = await self._call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return {entry.name: entry.state for entry in answer.models if entry.state}

    async def _watch(self) -> None:
        while True:
            states = await self._index()
            there = [name for name, state in states.items() if state != "UNAVAILABLE" and name.startswith("step")]
            self.outcome.looks += 1
            self.outcome.most_bytes = max(self.outcome.most_bytes, len(there) * SIZE)
            if len(there) * SIZE > self._plan.budget:
                self.outcome.faults[f"over: {len(there)} models in memory, {self._plan.budget // SIZE} fit"] += 1
            await asyncio.sleep(0.05)

    async def _agree(self) -> None:
        """At rest: compare the server's views of its models, and call each ensemble once more."""
        states = await self._index()
        for _ in range(1000):  # models that were unloaded last may still leave
            if "UNLOADING" not in states.values() and "LOADING" not in states.values():
                break
            await asyncio.sleep(0.05)
            states = await self._index()
        ready = {name for name, state in states.items() if state == "READY"}
        statistics = await self._call("ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse)
        counted = {each.name for each in statistics.model_stats}
        if counted != ready:
            self.outcome.faults[f"apart: the index has {sorted(ready)}, the statistics {sorted(counted)}"] += 1
        for name in self._names:
            answer = await self._call("ModelReady", pb.ModelReadyRequest(name=name), pb.ModelReadyResponse)
            if not answer.ready:
                self.outcome.faults[f"apart: {name} is not ready, although a request would load it"] += 1
        for number, name in enumerate(self._names):
            await self._infer(name, 0.0, number)


def storm(plan: Plan) -> Outcome:
    """Serve the repository to the clients; `Outcome.faults` has what does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        names = make(Path(folder) / "models", plan)
        options = [
            "--model-control-mode",
            "lazy",
            "--model-memory-budget",
            str(plan.budget),
            "--allow-metrics",
            "false",
        ]
        server: ServerProcess = inferd.start(Path(folder) / "models", Path(folder) / "log", options=options)
        try:
            outcome = asyncio.run(Storm(server.address, plan, names).run())
        finally:
            status = server.stop()
        log = server.log.read_text(errors="replace")
    if status != 0:
        outcome.faults[f"the server ended with {status}"] += 1
    found = LIVE_LINE.search(log)
    if left := {name: count for name, count in json.loads(found[1] if found else '{"unknown": 1}').items() if count}:
        outcome.faults[f"live: {left}"] += 1
    outcome.loads = log.count("successfully loaded 'step")
    for line in log.splitlines():
        if "still finishes what it has accepted" in line:
            outcome.faults["late: a model that was to leave"] += 1
        if "Traceback" in line or "over --model-memory-budget" in line:
            outcome.faults[f"log: {line[:200]}"] += 1
    return outcome


def main() -> int:
    """Run the storm; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=Plan().seconds)
    parser.add_argument("--seed", type=int, default=Plan().seed)
    given = parser.parse_args()
    outcome = storm(Plan(seconds=given.seconds, seed=given.seed))
    print(json.dumps({each.name: getattr(outcome, each.name) for each in fields(outcome)}, indent=2))
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
