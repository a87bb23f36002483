"""The content of a `config.pbtxt` after completion and validation. Specs are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model as the configuration describes it."""

    name: str
    datatype: str  # v2 protocol name: "FP32", "BYTES", ...
    dims: tuple[int, ...]  # without the batch dimension; -1 is variable
    optional: bool = False
    labels: tuple[str, ...] = ()  # class names of an output with a label file
    model_shape: tuple[int, ...] | None = None  # the model's shape in place of `dims`, with as many elements
    ragged: bool = False  # an input whose shapes may differ in a batch; the model gets the elements in one dimension
    shape_tensor: bool = False  # its values are a shape. If the model batches, the batch size is the first value, which
    # `dims` do not count; the tensor has no batch dimension, and all requests of a batch have the same values
    pad_value: float | None = None  # an input whose variable dimension is filled up with it within a batch
    cut_like: str = ""  # an output that gets back the length of this padded input
    like_input: str = ""  # an output that is split by the shapes of this ragged input

    @property
    def of_model(self) -> TensorSpec:
        """The tensor as the model has it."""
        if self.ragged or self.like_input:
            return replace(self, dims=())  # one dimension, where others have the batch
        return self if self.model_shape is None else replace(self, dims=self.model_shape)


@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """dynamic_batching of a model."""

    preferred_sizes: tuple[int, ...] = ()  # none: the same as the largest batch alone
    max_queue_delay_us: int = 0
    adaptive: bool = False  # wait only while that pays, and at most for the delay, if that is not 0


@dataclass(frozen=True, slots=True)
class SuppliedSpec:
    """An input of the model that the batch provides and no request carries.

    Attributes:
        kind: the meaning of its values, one of:
            START, END, READY: whether the request begins or ends its sequence, and whether this row has a request;
            CORRID: the correlation id of the sequence;
            END_REASON: why the sequence ends;
            STATE: the state that the sequence is in;
            BATCH_ELEMENT_COUNT, BATCH_ACCUMULATED_ELEMENT_COUNT, BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO,
            BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, BATCH_ITEM_SHAPE, BATCH_ITEM_SHAPE_FLATTEN: as Triton's
            BatchInput.Kind describes a ragged input.
        tensor: as the model sees it; its dims leave out the batch dimension.
        values: of START, END and READY for no and for yes.
        source: the output that updates a STATE, or the input that a BATCH_ kind is about.
    """

    kind: str
    tensor: TensorSpec
    values: tuple[float, float] = (0, 1)
    source: str = ""


@dataclass(frozen=True, slots=True)
class QueuePolicySpec:
    """How many requests of one priority level may wait, and how long."""

    max_size: int = 0  # requests; 0 for any number
    timeout_us: int = 0  # 0 for as long as it takes
    overridable: bool = False  # a request may name a shorter time
    yields: bool = False  # a late request keeps waiting after the others of its level; else it is refused


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """The queue policies of a model."""

    levels: tuple[QueuePolicySpec, ...] = (QueuePolicySpec(),)  # the highest priority, which is 1, first
    default_level: int = 1  # of requests that name none, or one that does not exist
    preserve_ordering: bool = False  # responses leave in the order in which requests came


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The initial value and the storage of a state; one for each STATE among the supplied inputs, in their order."""

    initial: bytes  # of one row
    dims: tuple[int, ...]  # of `initial`, without the batch dimension and without -1
    same_buffer: bool = False
    growable: bool = False


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """sequence_batching of a model, and the parameters that belong to it."""

    direct: bool = True  # a sequence has a row of the batch to itself; else the oldest requests form batches
    iterative: bool = False  # the model may reschedule a request any number of times
    max_idle_us: int = 1_000_000
    max_queue_delay_us: int = 0
    min_slot_utilization: float = 0.0  # direct
    max_candidates: int = 0  # oldest: sequences at a time for each instance; 0 for max_batch_size
    preferred_sizes: tuple[int, ...] = ()  # oldest; none: the same as the largest batch alone
    states: tuple[StateSpec, ...] = ()
    max_backlog: int = 0  # sequences that may wait for a slot; 0 for any number
    notices_end: bool = False  # the model executes once more when a sequence ends without a request with the END flag
    ends_with_stream: bool = False  # a sequence ends with the stream that it started on
    drain_seconds: int = 300  # how long live sequences continue when the version is replaced or unloaded


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """An input of a warm-up sample, and the origin of its data."""

    datatype: str
    dims: tuple[int, ...]  # of one row, without the batch dimension
    data: str = "zero"  # "zero", "random" or "file"
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class WarmupSpec:
    """Executions that an instance makes before it serves."""

    name: str
    batch_size: int  # requests of one row each; 1 for a model without batch dimension
    inputs: Mapping[str, WarmupInput]
    count: int = 1  # executions


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """A limited resource that an instance must hold while it executes."""

    name: str
    count: int
    is_global: bool = False  # one pool for the server, not one for each device


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance: a thread and a device."""

    name: str
    kind: str = "CPU"
    device: int = 0
    host_policy: str = ""  # its name; empty for the usual one of the kind
    passive: bool = False  # made, but given no requests
    profiles: tuple[int, ...] = ()  # TensorRT's optimisation profiles that it may use; none: the first
    resources: tuple[ResourceSpec, ...] = ()
    priority: int = 0  # an instance of priority 2 gets resources half as often as one of 1; 0 counts as 1


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A CUDA graph to capture."""

    rows: int  # of the batch that the graph computes
    lowest: int  # rows of the smallest batch that is padded to `rows`
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Shapes of inputs as the model sees them, without the batch dimension; other inputs have the configured shape."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """The options of instances on GPUs: `optimization` of a model."""

    graphs: tuple[GraphSpec, ...] = ()
    busy_wait: bool = False  # spin for the device instead of sleeping
    priority: int = 0  # of the streams: 1 the greatest that the device has, -1 the least
    pinned_inputs: bool = True  # inputs are gathered in page-locked memory
    pinned_outputs: bool = True


@dataclass(frozen=True, slots=True)
class AcceleratorSpec:
    """A library that executes parts of a model for its framework: `optimization.execution_accelerators`."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of an ensemble: a model, and which tensors of the ensemble its tensors are."""

    model: str
    version: int = -1  # -1: the latest when the request comes
    inputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # of the model, to the ensemble's
    outputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gate: str = ""  # the ensemble's BOOL tensor that decides whether the step runs
    gate_inverted: bool = False  # the step runs if the gate is false
    optional: frozenset[str] = frozenset()  # inputs that the model does not need
    decoupled: bool = False  # the model may give any number of responses


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    """ensemble_scheduling of a model."""

    steps: tuple[StepSpec, ...]
    max_inflight: int = 0  # requests of one step at a time, over all requests; 0: any number


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's configuration, complete and valid."""

    name: str
    backend: str
    platform: str = ""
    runtime: str = ""  # of several that a backend has: see Backend.runtimes
    max_batch_size: int = 0  # 0: the model has no batch dimension
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batching: BatchingSpec | None = None
    queue: QueueSpec = QueueSpec()
    sequence: SequenceSpec | None = None
    instances: tuple[InstanceSpec, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_model_filename: str = ""
    coalesces: bool = False  # identical requests in flight are executed once
    splits: bool = False  # a request with more rows than max_batch_size becomes several
    caches: bool = False  # responses are kept in the response cache
    graph_level: int | None = None  # optimization.graph.level, where the configuration has one
    warmup: tuple[WarmupSpec, ...] = ()
    pad_buckets: tuple[int, ...] = ()  # lengths to which padded inputs are filled up
    supplied: tuple[SuppliedSpec, ...] = ()  # further inputs of the model, from the batch
    kept: tuple[TensorSpec, ...] = ()  # further outputs of the model, which the server keeps: states of sequences
    decoupled: bool = False  # a request may have any number of responses
    single_responses: bool = False  # of a decoupled model: ModelInfer may ask it, and gets its only response
    gpu: GpuSpec = GpuSpec()
    gpu_accelerators: tuple[AcceleratorSpec, ...] = ()  # for instances on GPUs, the preferred one first
    cpu_accelerators: tuple[AcceleratorSpec, ...] = ()
    model_filenames: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Model files for GPUs of a compute capability, such as "9.0", that have a file of their own."""
    ensemble: EnsembleSpec | None = None  # for an ensemble, which has no backend and no instances

    @property
    def model_inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, as the model has them: those of requests, then the supplied ones."""
        return (*(tensor.of_model for tensor in self.inputs), *(supplied.tensor for supplied in self.supplied))

    @property
    def model_outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, as the model has them: those that requests can ask for, then those that the server
        keeps."""
        return (*(tensor.of_model for tensor in self.outputs), *self.kept)
