"""Configurations that no server can serve: each has one thing wrong, and is refused with the text that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inferd.backends.api import (
    EnsembleSpec,
    ModelSource,
    ModelSpec,
    QueuePolicySpec,
    QueueSpec,
    StepSpec,
    SuppliedSpec,
    TensorSpec,
)
from inferd.server.engine.models.version import _make_lane
from tests.simulation.kinds import KINDS
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from inferd._native.service.infer import InferService

Blunder = tuple[ModelSpec, str]  # the wrong configuration, and what its refusal says
NAMES = sorted(KINDS)
TRIES = 12  # of each simulation
MAX_RANK = 16
MAX_LEVELS = 256


def blunder(random: Random, spec: ModelSpec) -> Blunder:
    """This configuration with something wrong."""
    made = (
        [_of_steps, _of_tensors] if spec.ensemble is not None else [_of_tensors, _of_tensors, _of_batches, _of_queues]
    )
    blunders: list[Callable[[], Blunder]] = list(random.choice(made)(random, spec))
    return random.choice(blunders)()


def err(random: Random, service: InferService) -> None:
    """Try to make the lanes of some that are wrong.

    Raises:
        Violation: one is made, or refused for another reason.
    """
    for _ in range(TRIES):
        kind = KINDS[random.choice(NAMES)]
        spec, expected = blunder(random, kind.spec("wrong", 1))
        try:
            _make_lane(ModelSource(spec, 1, Path("/wrong")), service, 0, None)
        except ValueError as error:
            if expected not in str(error):
                raise Violation(f"'{kind.name}' is refused: {error}, and not: {expected}") from error
        else:
            raise Violation(f"'{kind.name}' is made, and was to be refused: {expected}")


def _with_input(spec: ModelSpec, **changes: object) -> ModelSpec:
    return replace(spec, inputs=(replace(spec.inputs[0], **changes), *spec.inputs[1:]))  # type: ignore[arg-type]


def _with_output(spec: ModelSpec, **changes: object) -> ModelSpec:
    return replace(spec, outputs=(replace(spec.outputs[0], **changes), *spec.outputs[1:]))  # type: ignore[arg-type]


def _of_tensors(random: Random, spec: ModelSpec) -> Iterator[Callable[[], Blunder]]:
    """What is wrong with the tensors of requests."""
    most = MAX_RANK - (spec.max_batch_size > 0)
    many = most + random.choice((1, 1, 5))
    x, y = spec.inputs[0].name, spec.outputs[0].name
    yield lambda: (
        _with_input(spec, dims=(-1,) * many),
        f"tensor '{x}' has {many} dimensions, at most {most} are served",
    )
    yield lambda: (
        _with_output(spec, dims=(2,) * many, cut_like=""),
        f"tensor '{y}' has {many} dimensions, at most {most} are served",
    )
    yield lambda: (_with_input(spec, datatype="INT9"), f"tensor '{x}' has unknown datatype 'INT9'")
    yield lambda: (_with_output(spec, datatype=""), f"tensor '{y}' has unknown datatype ''")
    yield lambda: (
        _with_input(spec, model_shape=(1,) * many),
        f"tensor '{x}' is reshaped to {many} dimensions, at most {most} are served",
    )
    for dims in ((), (3,), (-1, 2, -1)):
        yield lambda dims=dims: (  # type: ignore[misc]
            _with_input(spec, dims=dims, pad_value=1.0),
            f"padding needs exactly one variable dimension, '{x}' has {dims.count(-1)}",
        )
    for datatype in ("BYTES", "BF16"):
        yield lambda datatype=datatype: (  # type: ignore[misc]
            _with_input(spec, dims=(-1,), datatype=datatype, pad_value=1.0),
            f"inputs of {datatype} cannot be padded",
        )
    yield lambda: (_with_output(spec, like_input="nothing"), "the model has no input 'nothing'")
    yield lambda: (_with_output(spec, cut_like=y), f"the model has no input '{y}'")
    yield lambda: (
        _with_output(_with_input(spec, pad_value=None), dims=(2, -1), cut_like=x),
        f"output '{y}' is cut like input '{x}', which is not padded",
    )
    yield lambda: (
        _with_output(_with_input(spec, dims=(-1,), datatype="FP32", pad_value=0.0), dims=(2,), cut_like=x),
        f"padding needs exactly one variable dimension, '{y}' has 0",
    )


def _of_batches(random: Random, spec: ModelSpec) -> Iterator[Callable[[], Blunder]]:
    """What is wrong with what a batch tells the model."""

    def told(kind: str, datatype: str, source: str = "") -> ModelSpec:
        more = SuppliedSpec(kind, TensorSpec("told", datatype, (1,)), source=source)
        return replace(spec, supplied=(*spec.supplied, more))

    for kind in ("START", "END", "READY"):
        datatype = random.choice(("INT64", "FP16", "BYTES", "UINT8"))
        yield lambda kind=kind, datatype=datatype: (  # type: ignore[misc]
            told(kind, datatype),
            f"control 'told' is {datatype}, expected INT32, FP32 or BOOL",
        )
    counts = "BATCH_ELEMENT_COUNT", "BATCH_ITEM_SHAPE_FLATTEN"
    datatype = random.choice(("INT64", "BOOL", "FP64"))
    kind = random.choice(counts)
    yield lambda: (
        told(kind, datatype, "x"),
        f"batch input data type must be TYPE_INT32 or TYPE_FP32, 'told' is {datatype}",
    )
    for source in ("nothing", "told"):
        yield lambda source=source: (  # type: ignore[misc]
            told(kind, "INT32", source),
            f"the model has no input '{source}'",
        )
    yield lambda: (told("STATE", "INT64", "nothing"), "state 'told' needs an output of its own, got 'nothing'")
    y = spec.outputs[0].name
    other = SuppliedSpec("STATE", TensorSpec("state of y", "INT64", (1,)), source=y)
    yield lambda: (
        replace(spec, supplied=(other, *told("STATE", "INT64", y).supplied)),
        f"state 'told' needs an output of its own, got '{y}'",
    )


def _of_queues(random: Random, spec: ModelSpec) -> Iterator[Callable[[], Blunder]]:
    """What is wrong with the levels of its queue."""
    count = len(spec.queue.levels)
    if spec.sequence is None:
        for level in (0, count + 1, count + 7):
            yield lambda level=level: (  # type: ignore[misc]
                replace(spec, queue=replace(spec.queue, default_level=level)),
                f"default priority level {level}, expected 1 to {count}",
            )
        many = MAX_LEVELS + random.choice((1, 1, 100))
        for levels in (0, many):
            yield lambda levels=levels: (  # type: ignore[misc]
                replace(spec, queue=QueueSpec((QueuePolicySpec(),) * levels)),
                f"{levels} priority levels, 1 to {MAX_LEVELS} are served",
            )
    yield lambda: (_with_input(spec, datatype="INT9"), "tensor 'x' has unknown datatype 'INT9'")


def _of_steps(random: Random, spec: ModelSpec) -> Iterator[Callable[[], Blunder]]:
    """What is wrong with the graph of an ensemble."""
    assert spec.ensemble is not None
    steps = spec.ensemble.steps
    place = random.randrange(len(steps))
    model = steps[place].model

    def graph(*changed: StepSpec) -> ModelSpec:
        return replace(spec, ensemble=EnsembleSpec(changed, spec.ensemble.max_inflight if spec.ensemble else 0))

    def but(step: StepSpec) -> ModelSpec:
        return graph(*steps[:place], step, *steps[place + 1 :])

    def simple(source: str, result: str, *, many: bool = False) -> StepSpec:
        return StepSpec(model, inputs={"x": source}, outputs={"y": result}, decoupled=many)

    step = steps[place]
    for field in ("inputs", "gate"):
        changes = {"inputs": {**step.inputs, "more": "nothing"}} if field == "inputs" else {"gate": "nothing"}
        yield lambda changes=changes: (  # type: ignore[misc]
            but(replace(step, **changes)),
            f"step of model '{model}' reads 'nothing', which nothing writes",
        )
    own = next(iter(step.outputs.values()))
    # the first step that waits for itself, or for one that does
    yield lambda: (but(replace(step, inputs={"x": own})), "depends on itself")
    yield lambda: (
        graph(simple("q", "p"), simple("p", "q"), *steps),
        f"step of model '{model}' depends on itself",
    )
    yield lambda: (
        replace(spec, outputs=(*spec.outputs, TensorSpec("lost", "INT64", (-1,)))),
        "output 'lost' is not written",
    )
    both = StepSpec(model, inputs={"x": "p", "z": "q"}, outputs={"y": "r"})
    yield lambda: (
        graph(*steps, simple("x", "p", many=True), simple("x", "q", many=True), both),
        f"step of model '{model}' receives inputs originated from different decoupled models",
    )
    yield lambda: (
        graph(*steps, simple("x", "p", many=True), simple("p", "r"), simple("x", "r")),
        "the steps that write tensor 'r' run at different times: before, and for each response of a decoupled step",
    )
