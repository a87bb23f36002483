"""What models of a simulation may be like: their features, what excludes what, and the kinds that have any two of them.

`KINDS_OF_PAIRS` are made of `FEATURES` by pairwise covering. A kind that is made has the same expectations as any
other: the oracle derives them from its fields.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from inferd.backends.api import BatchingSpec, QueuePolicySpec, QueueSpec, SequenceSpec, StateSpec, StepSpec
from tests.simulation.beside import Beside, beside_of
from tests.simulation.covering import Row, Rule, Space, covering
from tests.simulation.kind import BATCHING, IDLE_US, INITIAL, MAX_ROWS, Kind, gated, step

FEATURES = {
    "scheduler": ("dynamic", "alone", "direct", "oldest", "iterative", "ensemble"),
    "style": (
        "fresh",
        "in place",
        "alternating",
        "native",
        "native brief",
        "native gathered",
        "native decoupled",
        "worker",
        "gpu",
    ),
    "delay": ("none", "some", "adaptive"),
    "preferred": ("any", "some"),  # sizes; of direct sequences, the part of the slots
    "levels": ("one", "three"),
    "room": ("any", "little"),  # in the queue
    "timeout": ("none", "refused", "yields", "asked"),  # asked: requests may ask for less
    "order": ("any", "kept"),
    "splits": ("no", "yes"),
    "shape": ("same", "ragged", "padded"),
    "reuse": ("none", "cached", "shared", "both"),
    "resources": ("none", "one", "two"),
    "fails": ("no", "yes", "alone"),  # alone: requests of a batch that fails are executed once more
    "stops": ("no", "yes"),
    "content": ("numbers", "strings"),
    "idle": ("long", "short"),
    "backlog": ("any", "little"),
    "state": ("none", "sum", "history", "in place"),
    "ends": ("quiet", "told", "with the stream"),
    "candidates": ("all", "few"),
    "answers": ("many", "single"),  # of decoupled models
    "steps": ("line", "gated", "spread"),
    "inflight": ("any", "one"),
    "instances": ("some", "one"),
    "beside": ("nothing", "given", "optional"),  # another input
    "dimension": ("batch", "none"),
    "warm": ("no", "yes"),  # before it serves
}

SEQUENTIAL = ("direct", "oldest")
SEQUENCES = (*SEQUENTIAL, "iterative")
QUEUES = ("dynamic", "alone")
BATCHED = ("dynamic",)
PYTHON = ("fresh", "in place")
ASYNC = ("alternating",)
STYLES = FEATURES["style"]
NATIVE = ("native", "native brief", "native gathered")
NO_STATES = "sequences of the world add numbers up"
ONLY_X = "models of the world that do more have one input"
ONLY_ROWS = "the world's {} take rows of numbers"

RULES = (
    Rule("delay", ("some",), "scheduler", ("dynamic", "direct", "oldest")),
    Rule("delay", ("adaptive",), "scheduler", BATCHED),
    Rule("preferred", ("some",), "scheduler", ("dynamic", "direct", "oldest")),
    Rule("levels", ("three",), "scheduler", BATCHED),
    Rule("room", ("little",), "scheduler", (*QUEUES, "direct", "oldest", "iterative", "ensemble")),
    Rule("timeout", ("yields",), "scheduler", QUEUES),
    Rule("timeout", ("asked",), "scheduler", (*QUEUES, "ensemble")),
    Rule("order", ("kept",), "scheduler", BATCHED),
    Rule("order", ("kept",), "levels", ("one",)),
    Rule("order", ("kept",), "timeout", ("none", "refused", "asked")),
    Rule("order", ("kept",), "reuse", ("none",)),
    Rule("splits", ("yes",), "scheduler", QUEUES),
    Rule("splits", ("yes",), "style", tuple(style for style in STYLES if style != "native decoupled")),
    Rule("reuse", ("cached", "shared", "both"), "scheduler", (*QUEUES, "ensemble")),
    Rule("reuse", ("cached", "shared", "both"), "style", tuple(s for s in STYLES if s != "native decoupled")),
    Rule("reuse", ("cached", "shared", "both"), "steps", ("line", "gated")),
    Rule("idle", ("short",), "scheduler", SEQUENTIAL),
    Rule("backlog", ("little",), "scheduler", SEQUENTIAL),
    Rule("state", ("sum", "history", "in place"), "scheduler", SEQUENTIAL),
    Rule("ends", ("told", "with the stream"), "scheduler", SEQUENTIAL),
    Rule("candidates", ("few",), "scheduler", ("oldest", "iterative")),
    Rule("answers", ("single",), "style", ("native decoupled",)),
    Rule("steps", ("gated", "spread"), "scheduler", ("ensemble",)),
    Rule("inflight", ("one",), "scheduler", ("ensemble",)),
    Rule("resources", ("one", "two"), "scheduler", (*QUEUES, *SEQUENCES)),
    Rule("instances", ("one",), "scheduler", (*QUEUES, *SEQUENCES)),
    # what an ensemble is, its steps say
    Rule("style", STYLES[1:], "scheduler", (*QUEUES, *SEQUENCES)),
    Rule("stops", ("yes",), "scheduler", (*QUEUES, *SEQUENCES)),
    Rule("fails", ("yes",), "scheduler", (*QUEUES, *SEQUENTIAL), "its steps fail, and what is executed again does not"),
    # what the world cannot play
    Rule("style", (*NATIVE, "native decoupled", "gpu"), "scheduler", QUEUES, NO_STATES),
    Rule("style", ("worker",), "scheduler", (*QUEUES, "oldest"), NO_STATES),
    Rule("style", ("in place",), "scheduler", (*QUEUES, "oldest"), NO_STATES),
    Rule("state", ("history",), "style", ("fresh",), NO_STATES),
    Rule("state", ("none",), "scheduler", (*QUEUES, *SEQUENCES, "ensemble")),
    Rule("state", ("in place",), "style", PYTHON, NO_STATES),
    Rule("ends", ("told", "with the stream"), "style", PYTHON, "its workers are told of no ends"),
    Rule("shape", ("ragged",), "style", ("fresh",), ONLY_ROWS.format("other styles")),
    Rule("shape", ("padded",), "style", (*PYTHON, *ASYNC, *NATIVE), ONLY_ROWS.format("other styles")),
    Rule("shape", ("ragged", "padded"), "scheduler", QUEUES, ONLY_ROWS.format("sequences")),
    Rule("shape", ("ragged",), "splits", ("no",), "who has which row is told by what a batch says of requests"),
    Rule("content", ("strings",), "scheduler", QUEUES, NO_STATES),
    Rule("content", ("strings",), "style", ("fresh", *NATIVE), ONLY_ROWS.format("other styles")),
    Rule("content", ("strings",), "shape", ("same",), ONLY_ROWS.format("other shapes")),
    Rule("content", ("strings",), "fails", ("no",), "strings have no signs"),
    Rule("fails", ("yes",), "style", (*PYTHON, *ASYNC, "worker"), "native models do not fail"),
    Rule("fails", ("alone",), "scheduler", QUEUES),
    Rule("fails", ("alone",), "style", ("fresh", *ASYNC), "what is written in place is not executed again"),
    Rule("stops", ("yes",), "style", (*PYTHON, *ASYNC), "native models do not stop"),
    Rule("style", ASYNC, "scheduler", QUEUES, NO_STATES),
    Rule("fails", ("yes", "alone"), "shape", ("same", "padded"), "a ragged model does not fail"),
    Rule("beside", ("given", "optional"), "scheduler", QUEUES, ONLY_X),
    Rule("beside", ("given", "optional"), "style", tuple(style for style in STYLES if style != "gpu"), ONLY_X),
    Rule("beside", ("given", "optional"), "content", ("numbers",), ONLY_X),
    Rule("beside", ("given", "optional"), "shape", ("same", "padded"), ONLY_X),
    Rule("warm", ("yes",), "style", (*PYTHON, *ASYNC, *NATIVE, "native decoupled"), "others need the world for it"),
    Rule("dimension", ("none",), "scheduler", ("alone", "ensemble")),
    Rule("dimension", ("none",), "splits", ("no",)),
    Rule("dimension", ("none",), "style", tuple(style for style in STYLES if style != "gpu"), "graphs are for rows"),
    Rule("dimension", ("none",), "shape", ("same",)),
    Rule("resources", ("one", "two"), "style", (*PYTHON, *ASYNC, "worker"), "others do not tell when they have them"),
)

SPACE = Space(FEATURES, RULES)

STATES = {
    "none": (),
    "sum": (StateSpec(np.int64(INITIAL).tobytes(), (1,)),),
    "history": (StateSpec(np.int64(INITIAL).tobytes(), (1,), same_buffer=True, growable=True),),
    "in place": (StateSpec(np.int64(INITIAL).tobytes(), (1,), same_buffer=True),),
}
TIMES = (StateSpec(bytes(8), (1,)),)
ROOM = 3
SHORT_US = 20_000
DELAY_US = 600
TIMEOUT_US = 700
STOPPED_US = 20_000


def _queue(row: Row) -> QueueSpec:
    sequences = row["scheduler"] in SEQUENCES
    policy = QueuePolicySpec(
        max_size=2 * ROOM * (4 if sequences else 1) if row["room"] == "little" else 0,
        timeout_us=0 if row["timeout"] == "none" else TIMEOUT_US * (10 if sequences else 1),
        overridable=row["timeout"] == "asked",
        yields=row["timeout"] == "yields",
    )
    if row["levels"] == "one":
        return QueueSpec((policy,), preserve_ordering=row["order"] == "kept")
    others = replace(policy, max_size=ROOM if policy.max_size else 0), replace(policy, timeout_us=0)
    return QueueSpec((policy, *others), default_level=2)


def _sequence(row: Row) -> SequenceSpec | None:
    scheduler = row["scheduler"]
    if scheduler not in SEQUENCES:
        return None
    iterative = row["scheduler"] == "iterative"
    states = TIMES if iterative else STATES[row["state"]]
    direct, some = scheduler == "direct", row["preferred"] == "some"
    return SequenceSpec(
        direct=direct,
        iterative=iterative,
        max_idle_us=SHORT_US if row["idle"] == "short" else IDLE_US,
        max_queue_delay_us=DELAY_US if row["delay"] == "some" else 0,
        min_slot_utilization=0.5 if direct and some else 0.0,
        max_candidates=0 if direct else 2 if row["candidates"] == "few" else 0,
        preferred_sizes=(2,) if some and not direct else (),
        states=states,
        max_backlog=ROOM if row["backlog"] == "little" else 0,
        notices_end=row["ends"] != "quiet",
        ends_with_stream=row["ends"] == "with the stream",
    )


def _steps(row: Row) -> tuple[StepSpec, ...]:
    if row["scheduler"] != "ensemble":
        return ()
    if row["steps"] == "gated":
        odd = StepSpec("odd", inputs={"x": "x"}, outputs={"g": "g"})
        return odd, gated("patient", "x", "y"), gated("levels", "x", "y", inverted=True)
    if row["steps"] == "spread":
        many = StepSpec("decoupled", inputs={"x": "x"}, outputs={"y": "t"}, decoupled=True)
        return many, step("parts", "t", "y")
    return step("plain", "x", "t"), step("delayed", "t", "y")


def _remembers(row: Row) -> str:
    if row["scheduler"] == "iterative":
        return "times"
    return {"none": "", "history": "history"}.get(row["state"], "sum")


def _beside(row: Row, number: int) -> Beside | None:
    # each part of a decoupled answer is a row
    if row["beside"] == "nothing" or (row["style"] == "native decoupled" and row["dimension"] == "none"):
        return None
    return beside_of(number, optional=row["beside"] == "optional")


def kind_of(row: Row, number: int) -> Kind:
    """The kind that has these features."""
    scheduler, style = row["scheduler"], row["style"]
    if scheduler in SEQUENTIAL and style == "worker" and row["state"] == "none":
        row = {**row, "state": "sum"}  # a worker that ends would forget its sums
    steps, is_told = _steps(row), row["ends"] != "quiet"
    many = row["answers"] == "many" or style != "native decoupled"
    is_native = style.startswith(("native", "gpu")) or row["content"] == "strings"
    delays = {"none": 0, "some": DELAY_US, "adaptive": DELAY_US}
    batching = None
    if scheduler == "dynamic":
        preferred = (4,) if row["preferred"] == "some" else ()
        batching = BatchingSpec(preferred, delays[row["delay"]], adaptive=row["delay"] == "adaptive")
    elif scheduler != "alone":
        batching = BATCHING
    state = _remembers(row)
    is_short = row["room"] == "little" or row["timeout"] != "none"
    return Kind(
        f"pairs{number}",
        instances=(1, 1) if row["instances"] == "one" else (2, 3),
        factor=4 if row["steps"] == "line" and steps else 1 if is_native else 2,
        style="again" if scheduler == "iterative" else style,
        rows=2 if scheduler in SEQUENTIAL and row["backlog"] == "little" else MAX_ROWS,
        duration_us=STOPPED_US if row["stops"] == "yes" else 4000 if is_short else 300,
        batching=batching,
        queue=_queue(row),
        needs={"none": 0, "one": 1, "two": 2}[row["resources"]],
        fails=row["fails"] != "no",
        isolates=row["fails"] == "alone",
        stops=row["stops"] == "yes",
        caches=row["reuse"] in ("cached", "both"),
        coalesces=row["reuse"] in ("shared", "both"),
        splits=row["splits"] == "yes",
        decoupled=style == "native decoupled" or (bool(steps) and row["steps"] == "spread"),
        single=not many,
        text=row["content"] == "strings",
        remembers=state,
        sequence_rows=2 if state and scheduler == "oldest" else 1,
        mourns=is_told,
        ragged=row["shape"] == "ragged",
        padded=row["shape"] == "padded",
        beside=_beside(row, number),
        flat=row["dimension"] == "none",
        warms=row["warm"] == "yes",
        sequence=_sequence(row),
        steps=steps,
        max_inflight=2 if row["inflight"] == "one" else 0,
        features=", ".join(f"{name} {value}" for name, value in row.items() if value != FEATURES[name][0]),
        weight=4,
    )


ROWS = covering(SPACE)
KINDS_OF_PAIRS = tuple(kind_of(row, number) for number, row in enumerate(ROWS))
