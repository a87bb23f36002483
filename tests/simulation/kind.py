"""A kind of model of a simulation: what it is, and what it answers.

All take `x`, INT64 [-1] in rows of which each begins with the number of its request, and most give `y`: the same
numbers in front, multiples of the others behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from inferd.backends.api import (
    BatchingSpec,
    EnsembleSpec,
    InstanceSpec,
    ModelSpec,
    QueuePolicySpec,
    QueueSpec,
    ResourceSpec,
    SequenceSpec,
    StepSpec,
    SuppliedSpec,
    TensorSpec,
    WarmupInput,
    WarmupSpec,
)

if TYPE_CHECKING:
    from tests.simulation.beside import Beside

MAX_ROWS = 8
IDLE_US = 5_000_000  # after which a sequence ends
FIRST_QUESTION = 1 << 28  # numbers of what is asked again and again; requests have lower ones
SCALE = 1 << 20  # numbers of requests are multiples of it in tensors
WARM_WIDTH = 16  # of the rows of samples for warming up, which have zeros; no other rows are as long and have those
INITIAL = 7  # what a state begins with
PADDING = -5.0  # at the end of a row that is shorter than others
BUCKETS = (3, 6, 16, 64)  # lengths that rows are made as long as
RAGGED = (  # what a batch says about a ragged input
    "ELEMENT_COUNT",
    "ACCUMULATED_ELEMENT_COUNT",
    "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "MAX_ELEMENT_COUNT_AS_SHAPE",
    "ITEM_SHAPE",
    "ITEM_SHAPE_FLATTEN",
)

SHAPED = (1, 9)  # values of a shape tensor; the first one is larger for some requests
CLIENTS = 64  # numbers of requests that follow each other differ by it
USHERED = (  # what an ensemble is refused with whose first step says in these ways to which sequence a request belongs
    "",
    "",
    "",
    "sequence batching control 'corrid' data-type is 'BYTES', but model 'oldest' expects 'UINT64'",
    "expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL",
    "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING",
)

ODD = tuple(map(str, range(1, 1000, 2)))

BATCHING = BatchingSpec()
QUEUE = QueueSpec()
G = (TensorSpec("g", "BOOL", (1,)),)


@dataclass(frozen=True)
class Kind:
    """A sort of model.

    Attributes:
        instances: how many there may be.
        factor: y is so many times x, but for the number in front.
        more: outputs beside y, and what they are multiples by.
        style: how instances work: "fresh" output, "in place", "alternating", which begins a batch while another one is
            executed, "native", "native brief", which takes no time, "native
            gathered", "native decoupled", which answers each row on its own, "gpu", "worker", in a process of its own,
            "again", which is executed more than once, or "odd", which says by `g`, BOOL [1], whether the number of the
            request is.
        stops: an execution can be stopped.
        isolates: the requests of a batch that fails are executed once more, each alone.
        rows: of the largest batch.
        duration_us: the longest execution; the shortest takes no time.
        delay_us: a batch may wait so long for more requests; None where nobody can say.
        queue: levels and limits.
        needs: resources of each instance.
        even_factor: in place of `factor` for requests with even numbers; 0 for no other one.
        decoupled: it answers each row on its own, and is asked by streams.
        mortal: its worker processes may end, or break their protocol.
        lacks: it leaves out its outputs but `y` where the number is even, which only an ensemble may have.
        text: numbers go to and fro as strings, which come back as they are.
        number: the datatype of the numbers otherwise; where it is narrow, it has their lowest bits.
        labels: of the first numbers of a row of y, as classes.
        tallies: a step of it keeps sequences, and it answers what that step does.
        remembers: what the state is that the server keeps of each sequence: "sum" of the second column, "history", all
            its numbers, or "times", how often a request was executed; empty: none.
        sequence_rows: of a request in a sequence, at most.
        mourns: it is told of every end of a sequence.
        named: sequences have texts as ids.
        control: the datatype of what it is told of sequences, and there the values for no and for yes.
        shaped: another input, `s`, is a shape tensor: requests with other values do not share a batch.
        ragged: it gets all elements in one dimension, and what the batch says about the shapes.
        padded: rows are as long as the longest of the batch for it.
        beside: another input, which comes back; None: it has none.
        flat: it has no batch dimension, so that each batch is one request, of any number of rows.
        clumsy: now and then it answers a batch with what cannot be its answer.
        warms: it executes samples before it serves.
        asks: its workers ask other models.
        ushers: its answers say to which sequence the steps behind it belong, or what cannot say that.
        mute: its workers end requests with even numbers without an answer.
        reorders: versions that follow each other have their tensors in another order.
        many: each answer of another step is a request of it, with the same number.
        mixes: `g` says whether the number of a row is odd, which differs within a request.
        fails_with: what requests for it are refused with.
        fails_where: which requests these are: "even" numbers, "several" rows, or all.
        max_inflight: requests of one of its steps at a time; 0: any number.
        single: ModelInfer may ask it, although it is decoupled, and gets its only answer.
        features: by which it was made, for people.
        popular: it is there where a large crowd asks, and takes large batches.
        weight: how often it is asked; 0: it is only a step of others.
    """

    name: str
    instances: tuple[int, int] = (1, 3)
    factor: int = 2
    even_factor: int = 0
    more: tuple[tuple[str, int], ...] = ()
    style: str = "fresh"
    stops: bool = False
    isolates: bool = False
    rows: int = MAX_ROWS
    duration_us: int = 300
    batching: BatchingSpec | None = BATCHING
    queue: QueueSpec = QUEUE
    needs: int = 0
    fails: bool = False
    caches: bool = False
    coalesces: bool = False
    splits: bool = False
    decoupled: bool = False
    mortal: bool = False
    lacks: bool = False
    text: bool = False
    number: str = "INT64"
    labels: tuple[str, ...] = ()
    tallies: bool = False
    remembers: str = ""
    sequence_rows: int = 1
    mourns: bool = False
    named: bool = False
    control: tuple[str, float, float] = ("INT32", 0, 1)
    shaped: bool = False
    ragged: bool = False
    padded: bool = False
    beside: Beside | None = None
    flat: bool = False
    warms: bool = False
    clumsy: bool = False
    asks: bool = False
    ushers: bool = False
    mute: bool = False
    reorders: bool = False
    many: bool = False
    mixes: bool = False
    fails_with: str = ""
    fails_where: str = ""
    sequence: SequenceSpec | None = None
    steps: tuple[StepSpec, ...] = ()
    max_inflight: int = 0
    single: bool = False
    features: str = ""
    popular: bool = False
    weight: int = 2

    @property
    def delay_us(self) -> int | None:
        """How long an idle instance may leave requests waiting; None: that is not ruled."""
        batching = self.batching
        # one of a decoupled model may wait for its client, too
        if self.sequence or self.decoupled or self.style in ("worker", "gpu"):
            return None
        if batching is None:
            return 0
        return None if batching.adaptive else batching.max_queue_delay_us

    @property
    def fills(self) -> bool:
        """Whether a batch has all that fit of what waits: none leaves because its time is over."""
        batching = self.batching
        is_patient = not any(policy.timeout_us or policy.overridable for policy in self.queue.levels)
        if self.stops:
            return False  # others may come before the instance has noted whom the batch is for
        return batching is not None and not batching.preferred_sizes and self.sequence is None and is_patient

    @property
    def may_be_late(self) -> bool:
        """Whether its instances may get their threads with the first request."""
        return not (self.steps or self.needs or self.sequence or self.warms or self.style in ("worker", "gpu"))

    @property
    def is_seen(self) -> bool:
        """Whether the world sees each of its executions: its models compute in Python, on threads of instances."""
        return not (self.steps or self.style.startswith(("native", "gpu")) or self.style == "worker")

    @property
    def sequential(self) -> bool:
        """Whether its requests belong to sequences of clients."""
        return self.tallies or (self.sequence is not None and not self.sequence.iterative)

    @property
    def datatype(self) -> str:
        """The datatype of x and y."""
        return "BYTES" if self.text else self.number

    @property
    def is_coded(self) -> bool:
        """Whether numbers are other bytes in requests and answers than here."""
        return self.datatype != "INT64"

    def encoded(self, x: np.ndarray) -> bytes:
        """The numbers as a request or an answer has them."""
        if self.text:
            return serialize_strings([written(value) for value in x.reshape(-1).tolist()])
        return self.typed(x).tobytes()

    def typed(self, x: np.ndarray) -> np.ndarray:
        """The numbers in the datatype that they have for clients."""
        return x.astype(self.number.lower().replace("fp", "float"))

    @property
    def classifies(self) -> bool:
        """Whether clients may ask for the greatest numbers of each row instead."""
        return not (self.text or self.decoupled or self.number == "BOOL")

    @property
    def contents(self) -> str:
        """The field of inference.InferTensorContents that has the numbers."""
        if self.text:
            return "bytes_contents"
        name = self.number.lower()
        return f"{name.rstrip('81632') if name.endswith(('8', '16', '32')) and 'int' in name else name}_contents"

    @property
    def max_rows(self) -> int:
        return 3 * self.rows if self.splits else self.rows

    def factors(self, number: int) -> dict[str, int]:
        """What the outputs of a request are multiples by, where models see this number."""
        factor = self.even_factor if self.even_factor and number % 2 == 0 else self.factor
        if self.steps and self.lacks and number % 2 == 0:
            return {"y": factor}
        return {"y": factor, **dict(self.more)}

    def failure(self, number: int, rows: int) -> str:
        """What a request is refused with, where models see this number; empty: it is not."""
        if self.ushers and self.steps:
            return USHERED[number // CLIENTS % len(USHERED)]
        fails = {"even": number % 2 == 0, "several": rows > 1}.get(self.fails_where, True)
        return self.fails_with if fails else ""

    def shape_values(self, number: int) -> list[int]:
        """The values of the shape tensor of a request with this number."""
        return [SHAPED[0] + number // CLIENTS % 3, *SHAPED[1:]]

    def outputs(self, number: int) -> list[str]:
        """The names of all outputs of a request, where models see this number."""
        return [*self.factors(number), *(["v"] if self.beside else [])]

    @property
    def is_of_one_shape(self) -> bool:
        """Whether all its inputs are there in each batch, with a shape that a CUDA graph can have."""
        return not (self.ragged or (self.beside is not None and self.beside.optional))

    @property
    def repeats(self) -> bool:
        """Whether a request may be executed more than once."""
        return self.sequence is not None and self.sequence.iterative

    def level(self, number: int) -> QueuePolicySpec:
        """The policy of this priority; numbers that are no level mean the default one."""
        levels = self.queue.levels
        return levels[number - 1 if 1 <= number <= len(levels) else self.queue.default_level - 1]

    def time_to_wait(self, level: int, asked_us: int) -> int:
        """How long a request that asks for so much may wait in the queue; 0: any time."""
        policy = self.level(level)
        asked_us = asked_us if policy.overridable else 0
        return min(asked_us, policy.timeout_us) if asked_us and policy.timeout_us else asked_us or policy.timeout_us

    @property
    def bounded(self) -> bool:
        """Whether its queue may be full."""
        backlog = self.sequence.max_backlog if self.sequence else 0
        return bool(backlog) or any(level.max_size for level in self.queue.levels)

    @property
    def reuses(self) -> bool:
        return self.caches or self.coalesces

    def spec(self, version: str, count: int) -> ModelSpec:
        """With so many instances."""
        needs = (ResourceSpec("R", self.needs),) if self.needs else ()
        names = ("y", *dict(self.more))
        more_inputs = (self.beside.tensor("w", is_input=True),) if self.beside else ()
        more_inputs += (TensorSpec("s", "INT32", (len(SHAPED),), shape_tensor=True),) if self.shaped else ()
        more_outputs = (self.beside.tensor("v", is_input=False),) if self.beside else ()
        turn = -1 if self.reorders and version.rpartition(".")[2] in ODD else 1
        on = "GPU" if self.style == "gpu" else "CPU"
        instances = tuple(InstanceSpec(f"{version}_{i}", on, resources=needs, priority=i) for i in range(count))
        return ModelSpec(
            self.name,
            "" if self.steps else "simulated",
            platform="ensemble" if self.steps else "",
            max_batch_size=0 if self.flat else self.rows,
            inputs=(
                TensorSpec(
                    "x", self.datatype, self._dims, ragged=self.ragged, pad_value=PADDING if self.padded else None
                ),
                *more_inputs,
            )[::turn],
            outputs=G if self.style == "odd" else (*(self._output(name) for name in names), *more_outputs)[::turn],
            batching=self.batching,
            queue=self.queue,
            sequence=self.sequence,
            instances=() if self.steps else instances,
            caches=self.caches,
            coalesces=self.coalesces,
            splits=self.splits,
            supplied=self._supplied(),
            kept=(TensorSpec("state out", "INT64", self._state_dims),) if self.remembers else (),
            pad_buckets=BUCKETS if self.padded else (),
            decoupled=self.decoupled,
            single_responses=self.single,
            ensemble=EnsembleSpec(self.steps, self.max_inflight) if self.steps else None,
            warmup=self._warmup() if self.warms else (),
        )

    def _warmup(self) -> tuple[WarmupSpec, ...]:
        """Two samples: one request, and a batch, where there are batches."""
        inputs = {"x": WarmupInput(self.datatype, (2, WARM_WIDTH) if self.flat else (WARM_WIDTH,))}
        if self.beside is not None and not self.beside.optional:
            inputs["w"] = WarmupInput(self.beside.datatype, tuple(abs(dim) for dim in self.beside.dims))
        rows = 1 if self.flat or self.batching is None else min(3, self.rows)
        return WarmupSpec("one", 1, inputs), WarmupSpec("several", rows, inputs, count=2)

    @property
    def _state_dims(self) -> tuple[int, ...]:
        return (-1,) if self.remembers == "history" else (1,)

    @property
    def _dims(self) -> tuple[int, ...]:
        """Dimensions of x and y as the configuration has them."""
        return (-1, -1) if self.flat else (-1,)

    def _output(self, name: str) -> TensorSpec:
        like = "x" if self.ragged else ""
        labels = self.labels if name == "y" else ()
        return TensorSpec(
            name, self.datatype, self._dims, labels=labels, like_input=like, cut_like="x" if self.padded else ""
        )

    def _supplied(self) -> tuple[SuppliedSpec, ...]:
        """What the batch tells a model beside the inputs of requests."""
        if self.ragged:
            return tuple(
                SuppliedSpec(
                    f"BATCH_{name}", TensorSpec(name, "INT32", (1,) if name == "ITEM_SHAPE" else ()), source="x"
                )
                for name in RAGGED
            )
        if self.sequence is None:
            return ()
        supplied = []
        control, *values = self.control
        if not self.sequence.iterative:
            supplied = [
                SuppliedSpec("START", TensorSpec("start", control, (1,)), values=(values[0], values[1])),
                SuppliedSpec("READY", TensorSpec("ready", control, (1,)), values=(values[0], values[1])),
                SuppliedSpec("CORRID", TensorSpec("corrid", "BYTES" if self.named else "UINT64", (1,))),
            ]
        if self.mourns:
            supplied.append(SuppliedSpec("END", TensorSpec("end", control, (1,)), values=(values[0], values[1])))
            supplied.append(SuppliedSpec("END_REASON", TensorSpec("reason", "INT32", (1,))))
        if self.remembers:
            supplied.append(SuppliedSpec("STATE", TensorSpec("state", "INT64", self._state_dims), source="state out"))
        return tuple(supplied)

    @property
    def initial(self) -> int:
        """The number that a state begins with."""
        return INITIAL if self.remembers in ("sum", "history") else 0


def written(value: int) -> bytes:
    """A number as a string, of a length that the number does not tell; one of sixteen is empty."""
    return b"" if value % 16 == 7 else str(value).encode() + b"\0" * (value % 5)


def serialize_strings(strings: list[bytes]) -> bytes:
    """The strings as a tensor of BYTES has them: each behind its length."""
    return b"".join(len(each).to_bytes(4, "little") + each for each in strings)


def step(model: str, source: str, result: str) -> StepSpec:
    return StepSpec(model, inputs={"x": source}, outputs={"y": result})


def gated(model: str, source: str, result: str, *, inverted: bool = False) -> StepSpec:
    """A step that runs where `g` says yes; with `inverted`, where it says no."""
    return StepSpec(model, inputs={"x": source}, outputs={"y": result}, gate="g", gate_inverted=inverted)
