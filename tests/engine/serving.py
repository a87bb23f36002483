"""A real engine around models whose code is in the test.

`serving` writes a repository, starts an `Engine` on the running loop and closes it again. Models with the backend
"puppet" do what the function that the test gives for them does, or have the instances that it creates.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inferd._native.execution.python_batch import Batch
from inferd._native.service.ticket import CallOrigin
from inferd.backends.api import Backend, Instance, InstanceSpec, Model, ModelSource
from inferd.backends.loader import BackendLoader
from inferd.server.caching import CacheConfig
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.gpu import GpuPolicy, Gpus
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.loading.control import ModelControl
from inferd_client.pb import grpc_service_pb2 as pb
from tests import gpu_stub

Execute = Callable[[Batch], None]

DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
}
V2_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

CONFIG = """
backend: "puppet"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { }
"""


Z = 'output { name: "z" data_type: TYPE_INT64 dims: [ -1 ] }'
YZ = f"""platform: "ensemble" max_batch_size: 8 input {{ name: "x" data_type: TYPE_INT64 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_INT64 dims: [ -1 ] }} {Z}
ensemble_scheduling {{ step {{ model_name: "m" model_version: -1 input_map {{ key: "x" value: "x" }}
output_map {{ key: "y" value: "y" }} output_map {{ key: "z" value: "z" }} }} }}"""


def ensemble_of(model: str) -> str:
    """The configuration of an ensemble whose one step is a model with `CONFIG`'s tensors."""
    return f"""
platform: "ensemble"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_INT64 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_INT64 dims: [ -1 ] }}
ensemble_scheduling {{ step {{
  model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }}
}} }}
"""


def echo(batch: Batch) -> None:
    """y is x."""
    batch.set_output("y", batch.input("x").numpy())


class Counting:
    """y is 2 x; counts the requests that were executed."""

    def __init__(self) -> None:
        self.requests = 0

    def __call__(self, batch: Batch) -> None:
        self.requests += batch.request_count
        batch.set_output("y", batch.input("x").numpy() * 2)


class PuppetBackend(Backend):
    """Runs the functions of a test by model name; remembers what was closed."""

    name = "puppet"

    def __init__(self, models: Mapping[str, Execute]) -> None:
        super().__init__()
        self.models = models
        self.closed: list[str] = []

    def load(self, source: ModelSource) -> Model:
        return PuppetModel(self, source.spec.name)


@dataclass
class PuppetModel(Model):
    backend: PuppetBackend
    name: str

    def create_instance(self, spec: InstanceSpec) -> Instance:
        create = getattr(self.backend.models[self.name], "create_instance", None)
        return PuppetInstance(self, spec.name) if create is None else create()

    def close(self) -> None:
        self.backend.closed.append(self.name)


@dataclass
class PuppetInstance(Instance):
    model: PuppetModel
    name: str

    @property
    def stoppable(self) -> bool:
        """Whether the test's function has `stop` and `resume`."""
        return hasattr(self.function, "stop")

    @property
    def writes_inputs(self) -> bool:
        """The test's function decides; one without an opinion may write."""
        return getattr(self.function, "writes_inputs", True)

    @property
    def isolates_failures(self) -> bool:
        """The test's function decides; one without an opinion does not."""
        return getattr(self.function, "isolates_failures", False)

    @property
    def function(self) -> Any:
        return self.model.backend.models[self.model.name]

    def execute(self, batch: Batch) -> None:
        self.function(batch)

    def stop(self) -> None:
        self.function.stop()

    def resume(self) -> None:
        self.function.resume()

    def close(self) -> None:
        self.model.backend.closed.append(self.name)


class Loader(BackendLoader):
    """Has the puppets and what the server brings."""

    def __init__(self, models: Mapping[str, Execute]) -> None:
        super().__init__()
        self.puppets = PuppetBackend(models)

    def backend(self, name: str) -> Backend:
        return self.puppets if name == "puppet" else super().backend(name)


@asynccontextmanager
async def serving(
    root: Path,
    execute: Execute | Mapping[str, Execute] = echo,
    *,
    hardware: Hardware | None = None,
    control: ModelControl | None = None,
    cache: CacheConfig = None,
    max_inflight: int | None = None,
    load_threads: int | None = None,
    **configs: str,
) -> AsyncIterator[Engine]:
    """An engine with these models: name=config.pbtxt; without any, the model "m" with `CONFIG`."""
    configs = configs or {"m": CONFIG}
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True, exist_ok=True)
        (root / name / "config.pbtxt").write_text(config)
    models = execute if isinstance(execute, Mapping) else dict.fromkeys(configs, execute)
    engine = Engine(
        [root],
        Loader(models),
        Options(),
        hardware=hardware,
        control=control,
        cache=cache,
        max_inflight=max_inflight,
        **({} if load_threads is None else {"load_threads": load_threads}),
    )
    async with running(engine):
        yield engine


@asynccontextmanager
async def serving_folder(
    root: Path, loader: BackendLoader | None = None, problems: int = 0, gpus: Gpus | None = None, **options: Any
) -> AsyncIterator[Engine]:
    """An engine with the models of a repository and the backends that the server has.

    Args:
        loader: of backends; None: one without configuration.
        problems: the number of models that do not load.
        gpus: None: it has none.
        options: further arguments of the engine.
    """
    if gpus is not None:
        options["hardware"] = Hardware(gpus=gpus)
    engine = Engine([root], loader or BackendLoader(), Options(gpus=gpus.count if gpus else 0), **options)
    async with running(engine, problems):
        yield engine


def puppets_of(engine: Engine) -> PuppetBackend:
    """The backend "puppet" of an engine with a `Loader`."""
    return engine._loader.puppets  # type: ignore[attr-defined]


async def poll(engine: Engine) -> None:
    """Do what an engine that polls its repositories does after each pause."""
    await engine._poller.look()


def gpus_of_stub(**policy: Any) -> Gpus:
    return Gpus(GpuPolicy(library=str(gpu_stub.library()), **policy))


@asynccontextmanager
async def running(engine: Engine, problems: int = 0) -> AsyncIterator[None]:
    """Start an engine, with this number of models that do not load, and close it in the end."""
    try:
        found = await engine.start()
        assert len(found) == problems, found
        yield
    finally:
        await engine.close()


class Gate:
    """Holds a model's executions: each waits until the test lets it go."""

    def __init__(self, execute: Execute = echo) -> None:
        self._execute = execute
        self._entered = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self.batches: list[tuple[int, int]] = []  # (requests, rows), as they came in

    def __call__(self, batch: Batch) -> None:
        self.batches.append((batch.request_count, batch.rows))
        self._entered.release()
        assert self._go.acquire(timeout=30)
        self._execute(batch)

    async def entered(self) -> None:
        """Wait for one more execution to have begun."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=30), "the model was not executed"

    def go(self, times: int = 1) -> None:
        """Let so many executions go on, or not stop at all."""
        self._go.release(times)


def request(
    model: str = "m", request_id: str = "", outputs: tuple[str, ...] = (), **inputs: Any
) -> pb.ModelInferRequest:
    """A request with these arrays as inputs; lists are BYTES."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        datatype = "BYTES" if value.dtype == object else V2_NAMES[value.dtype]
        message.inputs.add(name=name, datatype=datatype, shape=value.shape)
        raw = b"".join(len(e).to_bytes(4, "little") + e for e in value.flat) if datatype == "BYTES" else value.tobytes()
        message.raw_input_contents.append(raw)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def row(*values: int) -> np.ndarray:
    """One row of INT64."""
    return np.array([values], dtype=np.int64)


@dataclass
class Answer:
    """The response to a request."""

    status: int
    text: str = ""
    response: pb.ModelInferResponse = field(default_factory=pb.ModelInferResponse)

    def array(self, name: str = "y") -> np.ndarray:
        index = [output.name for output in self.response.outputs].index(name)
        output = self.response.outputs[index]
        raw = self.response.raw_output_contents[index]
        if output.datatype == "BYTES":
            return np.array(strings(raw), dtype=object).reshape(tuple(output.shape))
        return np.frombuffer(raw, dtype=DTYPES[output.datatype]).reshape(tuple(output.shape))


def strings(raw: bytes) -> list[bytes]:
    """The elements of an encoded BYTES tensor."""
    out, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        out.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return out


class Pending:
    """A submitted request."""

    def __init__(
        self, engine: Engine, message: pb.ModelInferRequest | bytes, timeout_ns: int = -1, user: int = -1, **who: int
    ) -> None:
        self.answers: list[Answer] = []
        self._done = asyncio.Event()
        self._submitting = True
        encoded = message if isinstance(message, bytes) else message.SerializeToString()
        self.ticket = engine.infer.submit(encoded, self._deliver, CallOrigin(user=user, **who), timeout_ns=timeout_ns)
        self._submitting = False

    def _deliver(self, status: int, text: str, response: bytes | None) -> None:
        assert not self._submitting, "delivered from inside submit"
        assert (response is not None) == (status == 0)
        self.answers.append(Answer(status, text, pb.ModelInferResponse.FromString(response or b"")))
        self._done.set()

    async def answer(self) -> Answer:
        await asyncio.wait_for(self._done.wait(), 30)
        [answer] = self.answers
        return answer


async def infer(engine: Engine, message: pb.ModelInferRequest, timeout_ns: int = -1, user: int = -1) -> Answer:
    """Submit one request and wait for its answer."""
    return await Pending(engine, message, timeout_ns, user).answer()


async def scale(engine: Engine, root: Path, count: int, name: str = "m") -> None:
    """Have a model loaded with another number of instances of its first group; see `Engine.load`."""
    path = root / name / "config.pbtxt"
    path.write_text(re.sub(r"count: \d+", f"count: {count}", path.read_text(), count=1))
    await engine.load(name)


async def infer_all(engine: Engine, *messages: pb.ModelInferRequest) -> list[Answer]:
    """Submit requests in one go, so that they may share batches."""
    pending = [Pending(engine, message) for message in messages]
    return [await each.answer() for each in pending]
