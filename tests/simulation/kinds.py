"""The models of simulations: those that were chosen, and those that pairs of features make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from inferd.backends.api import BatchingSpec, QueuePolicySpec, QueueSpec, SequenceSpec, StateSpec, StepSpec
from tests.simulation.beside import Beside
from tests.simulation.features import KINDS_OF_PAIRS
from tests.simulation.instances import WARMED
from tests.simulation.kind import IDLE_US, INITIAL, Kind, gated, step

DELAYED = BatchingSpec(preferred_sizes=(4,), max_queue_delay_us=500)
PATIENT = BatchingSpec(preferred_sizes=(6,), max_queue_delay_us=5000)
HURRIED = BatchingSpec(preferred_sizes=(32,), max_queue_delay_us=200)
LEVELS = QueueSpec(
    levels=(
        QueuePolicySpec(max_size=6),
        QueuePolicySpec(max_size=4, timeout_us=800),
        QueuePolicySpec(timeout_us=500, yields=True),
    ),
    default_level=2,
)

LABELS = ("first", "", "third", "Größe")  # of classes: the second has none
STATE = (StateSpec(np.int64(INITIAL).tobytes(), (1,)),)
GROWING = (StateSpec(np.int64(INITIAL).tobytes(), (1,), growable=True),)
IN_PLACE = (StateSpec(np.int64(INITIAL).tobytes(), (1,), same_buffer=True),)
TIMES = (StateSpec(bytes(8), (1,)),)

CHOSEN = {
    kind.name: kind
    for kind in (
        Kind("plain", weight=4),
        Kind("quick", duration_us=0, labels=LABELS, weight=4),
        Kind("alone", batching=None),
        Kind("delayed", batching=DELAYED, weight=4),
        Kind("patient", batching=PATIENT, weight=4),
        Kind("adaptive", batching=BatchingSpec(max_queue_delay_us=700, adaptive=True)),
        Kind("levels", queue=LEVELS, instances=(1, 1), weight=4),
        Kind("crowded", queue=LEVELS, instances=(1, 1), batching=None, duration_us=8000, weight=6),
        Kind("ordered", instances=(2, 3), duration_us=5000, queue=QueueSpec(preserve_ordering=True), weight=6),
        Kind("needy", needs=1),
        Kind("needier", needs=2),
        Kind("cached", caches=True),
        Kind("twins", coalesces=True),
        Kind("both", caches=True, coalesces=True, style="in place"),
        Kind("parts", splits=True),
        # what is executed is not the request itself, and must not wait longer than that may
        Kind("lingering", caches=True, coalesces=True, batching=PATIENT),
        Kind("portions", splits=True, batching=PATIENT),
        Kind("inplace", style="in place"),
        Kind("slow", duration_us=30_000),
        Kind("shuttle", style="alternating", instances=(1, 1), duration_us=3000, weight=4),
        Kind("bolted", style="alternating", stops=True, fails=True, isolates=True, duration_us=20_000, weight=4),
        Kind("failing", fails=True),
        Kind("clumsy", clumsy=True),
        Kind("native", style="native", factor=1, weight=4),
        Kind("gathered", style="native gathered", factor=1),
        Kind("brief", style="native brief", factor=1, weight=4),
        Kind("words", style="native", factor=1, text=True),
        Kind("floats", style="native", factor=1, number="FP64", labels=LABELS),
        Kind("singles", style="native gathered", factor=1, number="FP32", batching=DELAYED),
        *(
            Kind(name, style="native", factor=1, number=number, labels=labels)
            for name, number, labels in (
                ("bytes", "INT8", ()),
                ("shorts", "INT16", LABELS),
                ("ints", "INT32", ()),
                ("octets", "UINT8", LABELS),
                ("marks", "UINT16", ()),
                ("counts", "UINT32", ()),
                ("flags", "BOOL", ()),
            )
        ),
        Kind("naturals", style="native gathered", factor=1, number="UINT64", splits=True),
        Kind("sentences", style="native gathered", factor=1, text=True, splits=True, batching=DELAYED),
        Kind("spoken", factor=1, text=True),
        Kind("sayings", style="native gathered", factor=1, text=True, caches=True, coalesces=True),
        Kind("direct", sequence=SequenceSpec(max_idle_us=IDLE_US), weight=4),
        Kind("oldest", sequence=SequenceSpec(direct=False, max_candidates=4, max_idle_us=IDLE_US), weight=4),
        Kind(
            "again",
            style="again",
            sequence=SequenceSpec(direct=False, iterative=True, max_candidates=4, max_idle_us=IDLE_US),
        ),
        # sequences whose state the server keeps
        Kind(
            "kept",
            remembers="sum",
            fails=True,
            sequence=SequenceSpec(max_queue_delay_us=300, min_slot_utilization=0.5, max_idle_us=IDLE_US, states=STATE),
            weight=4,
        ),
        Kind(
            "history",
            remembers="history",
            sequence_rows=3,
            sequence=SequenceSpec(
                direct=False,
                max_candidates=3,
                preferred_sizes=(2,),
                max_queue_delay_us=400,
                max_idle_us=IDLE_US,
                states=GROWING,
            ),
            weight=4,
        ),
        Kind(
            "pages",
            remembers="sum",
            style="in place",
            sequence_rows=3,
            sequence=SequenceSpec(direct=False, max_candidates=4, max_idle_us=IDLE_US, states=IN_PLACE),
            weight=4,
        ),
        Kind(
            "mourned",
            mourns=True,
            rows=2,
            sequence=SequenceSpec(max_idle_us=20_000, max_backlog=3, notices_end=True),
            weight=4,
        ),
        Kind(
            "tied",
            mourns=True,
            sequence=SequenceSpec(max_idle_us=IDLE_US, notices_end=True, ends_with_stream=True),
            weight=4,
        ),
        Kind(
            "refined",
            style="again",
            remembers="times",
            sequence=SequenceSpec(direct=False, iterative=True, max_candidates=4, max_idle_us=IDLE_US, states=TIMES),
        ),
        Kind(
            "scribe",
            style="worker",
            remembers="sum",
            sequence=SequenceSpec(direct=False, max_candidates=4, max_idle_us=IDLE_US, states=STATE),
            weight=4,
        ),
        Kind(
            "drafts",
            style="worker",
            remembers="times",
            sequence=SequenceSpec(direct=False, iterative=True, max_candidates=4, max_idle_us=IDLE_US, states=TIMES),
        ),
        # rows of different lengths in a batch
        Kind("ragged", ragged=True, batching=DELAYED, weight=4),
        Kind("padded", padded=True, batching=DELAYED, weight=4),
        Kind("decoupled", style="native decoupled", factor=1, rows=150, decoupled=True, weight=4),
        Kind("worker", style="worker", fails=True, weight=4),
        Kind("asker", style="worker", asks=True, weight=4),
        Kind("orphan", style="worker", asks=True, mortal=True),
        Kind("mortal", style="worker", mortal=True),
        # many small responses, one right after the other
        Kind("herald", style="worker", decoupled=True, rows=150, weight=4),
        Kind("crier", style="worker", decoupled=True, rows=150, mortal=True),
        Kind(
            "rumour",
            steps=(
                StepSpec("herald", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True),
                step("parts", "t", "y"),
            ),
            factor=4,
            decoupled=True,
        ),
        # not by the loop, since it waits for resources
        Kind("bound", style="worker", mortal=True, needs=1),
        Kind("gpu", style="gpu", factor=1, weight=4),
        Kind("hall", popular=True, rows=64, batching=HURRIED, weight=8),
        Kind("stage", popular=True, rows=64, style="in place", weight=8),
        Kind("station", popular=True, rows=64, style="native gathered", factor=1, batching=HURRIED, weight=8),
        Kind("market", popular=True, rows=64, caches=True, coalesces=True, splits=True, weight=8),
        Kind("tour", popular=True, rows=64, steps=(step("station", "x", "t"), step("hall", "t", "y")), weight=8),
        Kind("odd", style="odd", weight=0),
        Kind("chain", steps=(step("plain", "x", "t"), step("inplace", "t", "y")), factor=4),
        Kind(
            "fan",
            steps=(step("cached", "x", "a"), step("both", "a", "b"), step("delayed", "b", "y")),
            factor=8,
        ),
        # an ensemble whose answers are kept, of models that are replaced
        Kind("page", coalesces=True, weight=0),
        Kind("picture", coalesces=True, style="in place", weight=0),
        Kind("album", steps=(step("page", "x", "t"), step("picture", "t", "y")), factor=4, caches=True, weight=4),
        # ensembles of ensembles
        Kind("nest", steps=(step("chain", "x", "t"), step("both", "t", "u"), step("twins", "u", "y")), factor=16),
        Kind("studio", steps=(step("gpu", "x", "t"), step("inplace", "t", "u"), step("gpu", "u", "y"))),
        Kind("office", steps=(step("worker", "x", "t"), step("plain", "t", "y")), factor=4),
        Kind("speech", steps=(step("words", "x", "t"), step("sayings", "t", "y")), factor=1, text=True),
        # requests that wait for others, and come from other threads than the loop's
        Kind("queueing", steps=(step("plain", "x", "t"), step("patient", "t", "y")), factor=4),
        Kind("tally", steps=(step("native", "x", "t"), step("direct", "t", "y")), factor=1, tallies=True),
        # two that write to the same input in place, beside one that reads it
        Kind(
            "fork",
            steps=(step("inplace", "x", "y"), step("both", "x", "z"), step("native", "x", "w")),
            more=(("z", 2), ("w", 1)),
        ),
        Kind(
            "gated",
            steps=(
                StepSpec("odd", inputs={"x": "x"}, outputs={"g": "g"}),
                gated("plain", "x", "y"),
                gated("chain", "x", "y", inverted=True),
            ),
            even_factor=4,
        ),
        # The model may leave an output out. A client's request then fails; a step that shares its work goes on.
        Kind("outline", batching=None, coalesces=True, lacks=True, more=(("z", 3),), weight=4),
        Kind(
            "sketch",
            steps=(StepSpec("outline", inputs={"x": "x"}, outputs={"y": "t", "z": "z"}), step("plain", "t", "y")),
            factor=4,
            more=(("z", 3),),
            coalesces=True,
            lacks=True,
            weight=4,
        ),
        # each response of the first step goes through the second on its own
        Kind(
            "spread",
            steps=(
                StepSpec("decoupled", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True),
                step("parts", "t", "y"),
            ),
            decoupled=True,
        ),
    )
}

MADE = {kind.name: kind for kind in KINDS_OF_PAIRS}
USUAL = CHOSEN | MADE

LIARS = (
    Kind("babbler", style="worker", clumsy=True, weight=4),
    Kind("liar", style="worker", mortal=True, weight=4),
    Kind("heckler", style="worker", decoupled=True, rows=150, mortal=True, weight=4),
)
ECHOES = (  # answers that are used again, and say to which parameters they are the answer
    Kind("echo", style="worker", caches=True, weight=4),
    Kind("mirror", style="worker", coalesces=True, weight=4),
)
ODDITIES = (  # of what batches tell models, and of what they have to be told
    Kind(
        "named",
        named=True,
        mourns=True,
        control=("FP32", -1.5, 2.5),
        sequence=SequenceSpec(max_idle_us=20_000, notices_end=True, ends_with_stream=True),
        weight=4,
    ),
    Kind(
        "labelled",
        named=True,
        remembers="sum",
        control=("BOOL", 0, 1),
        sequence=SequenceSpec(direct=False, max_candidates=3, max_idle_us=IDLE_US, states=STATE),
        weight=4,
    ),
    Kind("signed", control=("INT32", 7, -7), sequence=SequenceSpec(max_idle_us=IDLE_US), weight=4),
    Kind("shaped", shaped=True, batching=DELAYED, weight=4),
    Kind("torn", ragged=True, clumsy=True, batching=DELAYED, weight=4),
)
WORDS = Beside("BYTES", optional=True, dims=(-1,))
NUMBERS = Beside("INT64", dims=(-1,))
SKIPPING = step("plain", "x", "y")
HELPERS = (  # only steps of these
    Kind("companion", beside=WORDS, reorders=True, weight=0),
    Kind("duet", beside=NUMBERS, reorders=True, weight=0),
    Kind("odder", style="odd", weight=0),
    Kind("choir", style="worker", decoupled=True, rows=150, many=True, weight=0),
    Kind("parity", style="odd", mixes=True, weight=0),
    Kind("usher", style="worker", ushers=True, weight=0),
    Kind("mute", style="worker", mute=True, weight=0),
)
GRAPHS = (
    # another input, which may be missing, goes through
    Kind(
        "escort",
        steps=(StepSpec("companion", inputs={"x": "x", "w": "w"}, outputs={"y": "y", "v": "v"}),),
        beside=WORDS,
    ),
    # an output that the model may leave out is needed
    Kind(
        "shading",
        steps=(StepSpec("outline", inputs={"x": "x"}, outputs={"y": "t", "z": "u"}), step("plain", "u", "y")),
        factor=6,
        fails_with="missing required input(s) ['x']",
        fails_where="even",
    ),
    # a gate that is not there, since another one is closed, and a step that needs what is not there
    Kind(
        "ladder",
        steps=(
            SKIPPING,
            StepSpec("odd", inputs={"x": "x"}, outputs={"g": "g"}),
            StepSpec("odder", inputs={"x": "x"}, outputs={"g": "h"}, gate="g"),
            StepSpec("quick", inputs={"x": "x"}, outputs={"y": "z"}, gate="h"),
            step("inplace", "z", "u"),
        ),
        more=(("z", 2), ("u", 4)),
        lacks=True,
    ),
    Kind(
        "divided",
        steps=(
            StepSpec("parity", inputs={"x": "x"}, outputs={"g": "g"}),
            gated("plain", "x", "y"),
            gated("chain", "x", "y", inverted=True),
        ),
        factor=4,
        fails_with="the gate 'g' is true and false within one request",
        fails_where="several",
    ),
    Kind(
        "hush",
        steps=(step("mute", "x", "y"),),
        fails_with="unexpected deadlock, at least one output is not set while no more ensemble steps can be made",
        fails_where="even",
    ),
    Kind("parade", steps=(step("usher", "x", "t"), step("oldest", "t", "y")), ushers=True),
    # each answer has what there is once, too
    Kind(
        "encore",
        steps=(
            StepSpec("decoupled", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True),
            step("slow", "x", "z"),
            step("parts", "t", "y"),
        ),
        more=(("z", 2),),
        decoupled=True,
    ),
    # steps behind an answer that wait for one before it, and answers of answers
    Kind(
        "concert",
        rows=1,
        steps=(
            StepSpec("decoupled", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True),
            step("slow", "x", "u"),
            StepSpec("duet", inputs={"x": "t", "w": "u"}, outputs={"y": "y"}),
        ),
        decoupled=True,
    ),
    Kind(
        "canon",
        steps=(
            StepSpec("decoupled", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True),
            StepSpec("choir", inputs={"x": "t"}, outputs={"y": "u"}, decoupled=True),
            step("parts", "u", "y"),
        ),
        factor=4,
        decoupled=True,
    ),
)
# what else models on GPUs may be like
ON_GPUS = tuple(
    replace(each, style="gpu", factor=1, weight=4)
    for each in (
        Kind("gpu pair", beside=Beside("FP32", dims=(2, -1)), more=(("z", 3),)),
        Kind("gpu option", beside=Beside("INT16", optional=True, dims=(3,)), batching=DELAYED),
        Kind("gpu shaped", beside=Beside("UINT8", dims=(4,), model_shape=(2, 2))),
        Kind("gpu flat", flat=True, batching=None),
        Kind("gpu alone", flat=True, batching=None, beside=Beside("INT64", dims=(-1,))),
        Kind("gpu padded", padded=True, batching=DELAYED),
        Kind("gpu ragged", ragged=True, batching=DELAYED),
        Kind("gpu clumsy", clumsy=True),
        Kind("gpu sums", remembers="sum", sequence=SequenceSpec(direct=False, max_idle_us=IDLE_US, states=STATE)),
        Kind("gpu slots", remembers="sum", sequence=SequenceSpec(max_idle_us=IDLE_US, states=STATE)),
    )
)
ADDED = {"liars": LIARS, "echoes": ECHOES, "oddities": ODDITIES, "graphs": GRAPHS, "models on GPUs": ON_GPUS}
# of simulations that have some of these, beside the others
SHARES = {"liars": 0.2, "echoes": 0.2, "oddities": 0.3, "graphs": 0.3, "models on GPUs": 0.25}
KINDS = USUAL | {kind.name: kind for kind in (*LIARS, *ECHOES, *ODDITIES, *HELPERS, *GRAPHS, *ON_GPUS)}


def depth(kind: Kind) -> int:
    """How deep ensembles are nested in this kind; 0: it is no ensemble."""
    return max((1 + depth(KINDS[step.model]) for step in kind.steps), default=0)


def with_steps(kind: Kind) -> set[str]:
    """Names of all models that a request of this one may ask, with its own."""
    return {kind.name}.union(*(with_steps(KINDS[step.model]) for step in kind.steps))


WARMED.update(name for kind in KINDS.values() if kind.warms for name in with_steps(kind))

STEPS = {name: with_steps(kind) for name, kind in KINDS.items()}


def ends_apart(kind: Kind) -> bool:
    """Whether the end of its answers may be said behind the last one: by a worker, which may fail until then."""
    return kind.decoupled and any(KINDS[name].decoupled and KINDS[name].style == "worker" for name in STEPS[kind.name])


def kinds_with_steps(names: Mapping[str, Kind]) -> list[str]:
    """The names of these kinds, the steps of others first."""
    return sorted(names, key=lambda name: depth(names[name]))
