"""The contract between the engine and a backend.

The engine finds a backend by name (`inferd.backends.loader`), has it read a model file's signature (`Backend.inspect`),
loads a version once (`Backend.load`) and creates the configured number of instances from it. Each instance is called by
one thread of its own, one batch at a time.

The engine describes a model to a backend by the specs of `inferd.backends.specs`, which this module exports, too.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from inferd.backends.paths import OutsideError, inside
from inferd.backends.specs import (
    AcceleratorSpec,
    BatchingSpec,
    EnsembleSpec,
    GpuSpec,
    GraphSpec,
    InstanceSpec,
    ModelSpec,
    QueuePolicySpec,
    QueueSpec,
    ResourceSpec,
    SequenceSpec,
    StateSpec,
    StepSpec,
    SuppliedSpec,
    TensorSpec,
    WarmupInput,
    WarmupSpec,
)

if TYPE_CHECKING:
    from inferd._native.cuda.device import Stream
    from inferd._native.execution.python_batch import Batch
    from inferd._native.execution.view import View
    from inferd._native.gpu.batch import GpuBatch
    from inferd._native.memory.arena import ArenaHandle


__all__ = [
    "AcceleratorSpec",
    "AsyncInstance",
    "Backend",
    "BackendError",
    "Batch",
    "BatchingSpec",
    "EngineSpec",
    "EnsembleSpec",
    "GpuInstance",
    "GpuSpec",
    "GraphSpec",
    "Instance",
    "InstanceSpec",
    "Model",
    "ModelSource",
    "ModelSpec",
    "NativeInstance",
    "QueuePolicySpec",
    "QueueSpec",
    "RequestError",
    "ResourceSpec",
    "SequenceSpec",
    "Services",
    "Signature",
    "StateSpec",
    "StepSpec",
    "SuppliedSpec",
    "TensorSpec",
    "View",
    "WarmupInput",
    "WarmupSpec",
    "WorkerStatus",
]

SHOWN_FILES = 8


def __getattr__(name: str) -> object:
    """Import Batch and View on demand, because they need numpy, and many commands do not."""
    if name == "Batch":
        from inferd._native.execution.python_batch import Batch

        return Batch
    if name == "View":
        from inferd._native.execution.view import View

        return View
    raise AttributeError(f"module 'inferd.backends.api' has no attribute '{name}'")


class BackendError(Exception):
    """A model cannot be loaded or executed as asked.

    The text names the file, field or tensor, and what was expected.
    """


class RequestError(BackendError):
    """The requests of a batch are invalid, so they get INVALID_ARGUMENT; other errors mean INTERNAL.

    Every request of the batch gets this error, so raise it for a fault that they share, such as their shapes.
    """

    blames_requests = True


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The place of one version of a model."""

    spec: ModelSpec
    version: int
    path: Path  # the version directory
    make_json: Callable[[], str] = str  # makes `config_json`, which few backends use
    from_client: bool = (
        False  # a load request brought the configuration, which then names nothing outside the model's folder
    )

    @property
    def config_json(self) -> str:
        """The complete configuration as JSON, field names as in model_config.proto."""
        return self.make_json()

    def model_file(self, default: str) -> Path:
        """The model's file or folder: `default_model_filename` of the configuration, else `default`.

        Raises:
            BackendError: the configuration names one outside the model's folder.
        """
        name = self.spec.default_model_filename
        return self.path / default if name in ("", default) else self.file(name)

    def file(self, name: str) -> Path:
        """A file of the version that the configuration names; backends find such files in no other way.

        Raises:
            BackendError: the name leads out of the model's folder.
        """
        try:
            return inside(self.path, name, self.path.parent)
        except OutsideError as error:
            raise BackendError(f"model '{self.spec.name}': {error}") from None

    def not_found(self, path: Path) -> BackendError:
        """The error for a model file that is not there; its text lists the files that are."""
        return BackendError(f"unable to find '{path}' for model '{self.spec.name}'{self._there_is(path)}")

    def _there_is(self, path: Path) -> str:
        if (self.path.parent / path.name).is_file():
            return f": it lies beside the version folder, move it into {self.path}"
        try:
            names = sorted(each.name for each in path.parent.iterdir() if not each.name.startswith((".", "__")))
        except OSError:
            return ""
        shown = ", ".join(names[:SHOWN_FILES]) + (", ..." if len(names) > SHOWN_FILES else "")
        if not names:
            return ": the folder is empty"
        return f": the folder has {shown}; rename the file, or write default_model_filename into config.pbtxt"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model file says about itself, used to complete and to check the configuration."""

    inputs: tuple[TensorSpec, ...]  # dims without the batch dimension if `batches`, whole otherwise
    outputs: tuple[TensorSpec, ...]
    batches: bool  # every input and output has a variable first dimension
    max_batch_size: int = 0  # rows that the model can take; 0 where the file sets no limit


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An order to build a model for a GPU of this machine: see `inferd build-engine`."""

    model: Path
    profiles: tuple[str, ...] = ()  # of shapes that vary; see inferd.backends.tensorrt.profiles
    max_batch_size: int = 0  # instead of profiles, where only the batch varies
    precisions: tuple[str, ...] = ()  # that kernels may have beside the model's own: "fp16", ...
    strongly_typed: bool = False  # every tensor has the type that the model gives it
    version_compatible: bool = False  # later versions run it, too
    lean_runtime: bool = True  # a version-compatible engine contains the runtime that later versions need
    hardware_compatible: bool = False  # GPUs of later generations run it, too
    weight_streaming: bool = False
    optimization_level: int | None = None
    workspace: int = 0  # bytes of the device for one kernel, at most; 0: all
    device: int = 0
    compute_capability: str = ""  # of another GPU than this machine's
    runtime: str = ""  # the framework that builds; empty: the usual one
    cache: Path | None = None  # the folder that keeps engines; None: the usual one


class Services(Protocol):
    """What models may call in the server, from any thread."""

    @property
    def entrance(self) -> object:
        """A capsule "inferd.submission": the Submission (`_native/service/submission.pxd`) for models' requests."""

    def ask(self, what: str, arguments: Mapping[str, object]) -> Future[object]:
        """Call the server for something other than inference.

        "is_model_ready" and "is_decoupled" (name, version), "load_model" (name, config, files: contents by "file:" and
        path), "unload_model" (name, unload_dependents), "metric_value" (family, labels); "asked_by" is the calling
        model. The future's exception is a `BackendError`, or one with a `status`.
        """

    def measure(self, user: object, change: Mapping[str, object]) -> None:
        """Change a metric of a model's own, as METRIC in worker/protocol.py of the Python backend describes it.

        `user` stands for the owner of the metric: `forget_measures` removes the metrics of an owner.
        """

    def forget_measures(self, user: object) -> None:
        """Forget a user, and remove the metrics that no other user has made."""


class Backend(abc.ABC):
    """One per format; made by `inferd.backends.loader` and shared by all models of that format.

    Making one imports no framework, so `model_filename` can be read from every backend.
    """

    name: ClassVar[str]
    completes: ClassVar[bool] = False  # models may complete their configurations themselves
    completes_missing: ClassVar[bool] = False  # a model is asked only if its configuration lacks something
    model_filename: ClassVar[str] = ""  # the file or folder looked for in a version directory
    needs_tensors: ClassVar[bool] = True  # a model has at least one input and one output
    gpu_accelerators: ClassVar[frozenset[str]] = frozenset()  # names of execution accelerators that it knows
    cpu_accelerators: ClassVar[frozenset[str]] = frozenset()

    runtimes: ClassVar[frozenset[str]] = frozenset()  # values of `runtime` that choose another way than the usual one

    services: Services | None = None  # set before the first model is loaded; None: without a server

    def __init__(self, config: Mapping[str, str] = MappingProxyType({})) -> None:
        """`config` has the options of `--backend-config`: those for every backend, then those for this one."""
        self.config = config

    def for_program(self, name: str, program: Path) -> Backend:  # noqa: ARG002 (for the one that runs programs)
        """A backend of another name that serves each of its models by running this program.

        Raises:
            BackendError: this backend runs no programs.
        """
        raise BackendError(f"backend '{self.name}' runs no programs such as '{program}'")

    def inspect(self, source: ModelSource) -> Signature | None:  # noqa: ARG002 (for those who override it)
        """Read names, datatypes and shapes from the model file; None when the format does not record them.

        Raises:
            BackendError: the file cannot be read as a model of this format.
        """
        return None

    def guess(self, source: ModelSource, known: Sequence[TensorSpec], *, whole: bool) -> Signature:  # noqa: ARG002
        """Run the model to find its inputs and outputs, where its file does not record them. Blocks.

        Args:
            known: the inputs that the caller knows, without the batch dimension.
            whole: `known` has all dimensions, and the model is to have no batch dimension.

        Raises:
            BackendError: the trial did not succeed; the text says what the caller must state.
        """
        raise BackendError(f"backend '{self.name}' does not guess what '{source.spec.name}' takes and gives")

    def complete(self, source: ModelSource) -> str | None:  # noqa: ARG002 (for those who override it)
        """The configuration of `source.config_json`, completed by the model itself; None when it does not. Blocks.

        Called only for backends with `completes`.

        Raises:
            BackendError: the model refuses its configuration.
        """
        return None

    def build(self, spec: EngineSpec, tell: Callable[[str, int], object]) -> Path:  # noqa: ARG002 (for who builds)
        """Build a model for a GPU, or find it built, and return the file. Blocks, maybe for minutes.

        Args:
            tell: called on any thread with the current step and the percentage done.

        Raises:
            BackendError: this backend builds nothing, or cannot build this model.
        """
        raise BackendError(f"backend '{self.name}' builds no models")

    def check(self, source: ModelSource) -> None:
        """Find errors that would keep a version from loading, without executing the model's own code.

        Raises:
            BackendError: as for `load`.
        """
        self.load(source).close()

    @abc.abstractmethod
    def load(self, source: ModelSource) -> Model:
        """Load one version. Called outside the event loop; may take long.

        Raises:
            BackendError: the model does not load or contradicts its configuration.
        """


class Model(abc.ABC):
    """One loaded version."""

    arena: ArenaHandle | None = None  # the server receives large messages for the model into it; None: anywhere
    any_thread: ClassVar[bool] = False
    """Whether any threads may make, use and close its instances on the CPU, one at a time. Then instances get their
    threads with the first request, and idle models need none."""

    @abc.abstractmethod
    def create_instance(self, spec: InstanceSpec) -> Instance:
        """Make an instance; called once for each configured instance."""

    def close(self) -> None:
        """Free what the version holds; called after all its instances are closed."""
        return


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The process in which an instance works.

    Attributes:
        state: one of STATES.
        restarts: how often the server started another process because the last one had ended.
        pid: of the process; 0: there is none now, or a thread of the server does the work.
    """

    STATES: ClassVar = ("starting", "up", "waiting")
    """In this order: the process loads its model; it serves; it has ended several times in a row, and the server pauses
    before it starts the next one."""

    state: str
    restarts: int
    pid: int


class Instance(abc.ABC):
    """Runs batches: one thread calls it, one batch at a time."""

    stoppable: bool = False  # it has `stop`, which the server calls when no client waits any more
    writes_inputs: ClassVar[bool] = True
    """Whether `execute` may write to its inputs. If so, the server first copies inputs that others can see (steps of an
    ensemble, the response cache, requests that share an execution, a client's shared memory). If not, inputs may be
    shared memory, and views of them are read-only."""
    isolates_failures: ClassVar[bool] = False
    """Whether the requests of a failed batch are executed once more, each alone: one request's content then fails no
    other request. For executions without side effects. It has no effect for sequences."""

    @abc.abstractmethod
    def execute(self, batch: Batch) -> None:
        """Run the batch and set every wanted output on it.

        An exception fails every request of this batch with INTERNAL and its text, and nothing else; but see
        `isolates_failures`.
        """

    def stop(self) -> None:
        """Make `execute` end early: every request of its batch was cancelled or is late.

        The event loop calls this, perhaps just before `execute` begins or after it has ended, at most once a batch, and
        never for requests of sequences. It must be quick. The server then ignores the outcome of `execute`.
        """
        return

    def resume(self) -> None:
        """The stopped batch has ended; called on the instance's thread before the next batch."""
        return

    def close(self) -> None:
        """Free what the instance holds; called on its thread after its last batch."""
        return

    def drain(self) -> None:
        """Only the queued requests will still come. Called on another thread, before `close`."""
        return

    @property
    def ready(self) -> bool:
        """Whether the instance can execute now. One whose readiness changes calls the callback of `watch`."""
        return True

    def check(self) -> Future[bool] | None:
        """Ask the model itself whether it is ready; None for a model that does not say. Must not block."""
        return None

    @property
    def worker(self) -> WorkerStatus | None:
        """The instance's worker process; None if the instance works in the server's own. From any thread."""
        return None

    def watch(self, changed: Callable[[], object]) -> None:  # noqa: B027 (for those whose readiness changes)
        """Register `changed`, to be called on any thread whenever `ready` may have changed."""


class AsyncInstance(Instance):
    """An instance whose framework executes on threads of its own: the server begins a batch, and waits for it later.

    If it has an `alternate`, the server uses both alternately, on one thread: while one executes a batch, the other
    begins the next batch if that is full, and the server ends them in order. So the framework always has its next work.
    Instances of sequences, and those under the rate limiter, begin no batch before the last one has ended.
    """

    alternate: AsyncInstance | None = None
    """A second instance like this one; the framework executes the two alternately.
    The server closes only this one."""

    @abc.abstractmethod
    def begin(self, batch: Batch) -> None:
        """Begin to execute the batch, without waiting. An exception fails it, and it has no `end`."""

    @abc.abstractmethod
    def end(self, batch: Batch) -> None:
        """Wait for the batch that was begun, and set every wanted output on it. An exception fails it."""

    def execute(self, batch: Batch) -> None:
        """Begin the batch, and wait for it."""
        self.begin(batch)
        self.end(batch)


class NativeInstance(Instance):
    """An instance whose work is a C function: `execute` is never called, `executor` runs without the GIL.

    `executor` is a capsule named "inferd.execute_fn" around a function of type `execute_fn` (see
    `_native/execution/batch.pxd`); each call gets the capsule's context. `gate`, if there is one, is a capsule named
    "inferd.await_fn" around an `await_fn`: the instance's thread calls it before each batch, and it may wait. `remote`,
    if another process does the work, is a capsule named "inferd.remote" around a `Remote`
    (`_native/execution/remote.pxd`), with which the event loop begins and ends batches without the instance's thread.
    `input_device` is the GPU on which the instance reads inputs where trusted clients have put them; the server copies
    other inputs to the host's memory. -1: none. An `executor` that writes to inputs without `batch_gather` looks at
    `InputData.exclusive`. `brief` declares that an execution takes a few microseconds, waits for nothing, and that any
    thread may do it, one batch at a time: then I/O threads execute small batches themselves, and no thread is woken.
    """

    executor: object
    gate: object = None
    remote: object = None
    input_device: int = -1
    brief: bool = False

    def execute(self, batch: Batch) -> None:  # noqa: ARG002
        raise TypeError("a native instance is executed through its executor")


class GpuInstance(Instance):
    """An instance on a GPU that submits its work instead of waiting for it.

    The server gathers and uploads the inputs, calls `submit`, and downloads the outputs, each on a stream of its own,
    so batches overlap. One thread calls `submit`, with the device's context current.
    """

    stream: Stream
    """The stream of the model's work; the instance makes it, on its device."""
    _lost = False
    _changed: Callable[[], object] | None = None

    @abc.abstractmethod
    def submit(self, batch: GpuBatch) -> None:
        """Submit the model's work to `stream` and set every wanted output, without waiting for the device.

        Where graphs are captured, it is also called for batches without requests (`batch.capturing`). An exception
        fails every request of this batch with INTERNAL and its text, and nothing else.
        """

    def execute(self, batch: Batch) -> None:  # noqa: ARG002
        raise TypeError("an instance on a GPU submits")

    @property
    def ready(self) -> bool:
        """False once its device has failed for good."""
        return not self._lost

    def watch(self, changed: Callable[[], object]) -> None:
        """Have `changed` called when the device fails."""
        self._changed = changed

    def lost(self) -> None:
        """The server calls this when the device has failed for good: every further batch fails."""
        self._lost = True
        if self._changed:
            self._changed()
