"""Guards random graphs of steps against a plain model of what an ensemble is: the values of its outputs, which steps
are executed for them, gates, optional tensors, and that every request ends once.
"""

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd._native.memory.resource import live_counters
from inferd.server.errors import Status
from tests.engine.serving import Pending, request, serving
from tests.engine.test_ensembles import model, parameter, step, tensors

SKIPPED = "skipped"  # in place of a value; None is missing


def optional_sum(batch):
    b = batch.input("b")
    batch.set_output("y", batch.input("a").numpy() + (10 * b.numpy() if b is not None else 0))


def is_even(batch):
    batch.set_output("y", (batch.input("x").numpy().sum(axis=1, keepdims=True) % 2) == 0)


@dataclass(frozen=True)
class Kind:
    """A model: its inputs, outputs and meaning, in the server and here."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    meaning: object
    execute: object = None
    optional: tuple[str, ...] = ()
    config: str = ""


EVEN = model(extra="").replace(tensors("output", "y"), tensors("output", "y", datatype="BOOL", dims="[ 1 ]"))
IDENTITY = model(inputs=("a", "b"), outputs=("y", "z")).replace("puppet", "identity")
KINDS = {
    "next": Kind(("x",), ("y",), lambda x: [x + 1], lambda b: b.set_output("y", b.input("x").numpy() + 1)),
    "twice": Kind(("x",), ("y",), lambda x: [2 * x], lambda b: b.set_output("y", 2 * b.input("x").numpy())),
    "both": Kind(("a", "b"), ("y", "z"), lambda a, b: [a, b], config=IDENTITY),
    "sum": Kind(
        ("a", "b"),
        ("y",),
        lambda a, b: [a + b],
        lambda batch: batch.set_output("y", batch.input("a").numpy() + batch.input("b").numpy()),
    ),
    "some": Kind(("a", "b"), ("y",), lambda a, b: [a + (10 * b if b is not None else 0)], optional_sum, ("b",)),
    "even": Kind(("x",), ("y",), lambda x: [x.sum(axis=1, keepdims=True) % 2 == 0], is_even, (), EVEN),
}
NUMERIC = [name for name in KINDS if name != "even"]


@dataclass
class Step:
    kind: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    gate: str = ""
    inverted: bool = False


@dataclass
class Graph:
    steps: list[Step]  # each behind those that it depends on
    order: list[int]  # in which they are written down
    outputs: list[str]
    gates: list[str]  # tensors that are BOOL
    reads_optional: bool


@st.composite
def graphs(draw):
    numbers, gates, steps = ["x"], [], []

    def new_step(kind, outputs=None, gate="", inverted=False):
        known = KINDS[kind]
        inputs = {}
        for name in known.inputs:
            choice = [*numbers, "o"] if name in known.optional else numbers
            inputs[name] = draw(st.sampled_from(choice))
        names = outputs or [f"t{len(steps)}{name}" for name in known.outputs]
        steps.append(Step(kind, inputs, dict(zip(known.outputs, names, strict=True)), gate, inverted))
        return names

    new_step("next")
    numbers += steps[0].outputs.values()
    for _ in range(draw(st.integers(1, 9))):
        shape = draw(st.sampled_from(["plain", "plain", "gate", "gated", "either"]))
        if shape == "gate" or (shape != "plain" and not gates):
            gates += new_step("even")
            continue
        if shape == "plain":
            numbers += new_step(draw(st.sampled_from(NUMERIC)))
            continue
        gate, inverted = draw(st.sampled_from(gates)), draw(st.booleans())
        single = [kind for kind in NUMERIC if len(KINDS[kind].outputs) == 1]
        names = new_step(draw(st.sampled_from(single)), gate=gate, inverted=inverted)
        if shape == "either":
            new_step(draw(st.sampled_from(single)), names, gate, not inverted)
        numbers += names
    written = [name for each in steps for name in each.outputs.values()]
    read = {name for each in steps for name in (*each.inputs.values(), each.gate)}
    outputs = [name for name in dict.fromkeys(written) if name not in read or draw(st.booleans())]
    order = draw(st.permutations(range(len(steps))))
    return Graph(steps, list(order), outputs, gates, "o" in read)


def config_of(graph):
    written = [graph.steps[index] for index in graph.order]
    text = 'platform: "ensemble"\nmax_batch_size: 8\n' + tensors("input", "x")
    if graph.reads_optional:
        text += tensors("input", "o", extra="optional: true")
    for name in graph.outputs:
        is_gate = name in graph.gates
        text += tensors("output", name, datatype="BOOL" if is_gate else "INT64", dims="[ 1 ]" if is_gate else "[ -1 ]")
    text += "ensemble_scheduling {\n" + "".join(step(each.kind, each.inputs, each.outputs) for each in written) + "}\n"
    for index, each in enumerate(written):
        if each.gate:
            text += parameter(f"gate[{index}]", ("!" if each.inverted else "") + each.gate)
    return text


def evaluate(graph, inputs, wanted):
    """Values of the wanted outputs (absent ones left out), and how often each kind of step is executed."""
    needed, steps = set(wanted), []
    for each in reversed(graph.steps):
        if needed & set(each.outputs.values()):
            steps.insert(0, each)
            needed |= {*each.inputs.values(), each.gate}
    values = dict(inputs)
    executed = Counter()
    for each in steps:
        known = KINDS[each.kind]
        given = [values.get(each.inputs[name]) for name in known.inputs]
        runs = True
        if each.gate:
            gate = values[each.gate]
            runs = not isinstance(gate, str) and bool((gate != each.inverted).any())
        required = [value for name, value in zip(known.inputs, given, strict=True) if name not in known.optional]
        if not runs or any(isinstance(value, str) for value in required):
            for name in each.outputs.values():
                values.setdefault(name, SKIPPED)
            continue
        executed[each.kind] += 1
        answers = known.meaning(*(None if isinstance(value, str) else value for value in given))
        for name, answer in zip(each.outputs.values(), answers, strict=True):
            # of two opposite steps both may run where the rows of a batch differ: the first to answer counts
            values[name] = answer if isinstance(values.get(name, SKIPPED), str) else values[name]
    return {name: values[name] for name in wanted if not isinstance(values[name], str)}, executed


@st.composite
def questions(draw, graph):
    """One request: its inputs and the outputs that it asks for. One row, or rows alike in what gates see."""
    x = np.array([draw(st.lists(st.integers(-9, 9), min_size=2, max_size=2))], np.int64)
    x = np.repeat(x, draw(st.integers(1, 3)), axis=0)
    inputs = {"x": x}
    if graph.reads_optional and draw(st.booleans()):
        inputs["o"] = x * 3
    asked = draw(st.lists(st.sampled_from(graph.outputs), unique=True, max_size=3))
    return inputs, tuple(asked), draw(st.integers(0, 9)) == 0  # the last: it is cancelled


async def check(graph, asked):
    configs = {name: kind.config or model(inputs=kind.inputs, optional=kind.optional) for name, kind in KINDS.items()}
    models = {name: kind.execute for name, kind in KINDS.items()}
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), models, **configs, e=config_of(graph)) as engine:
            pending = [Pending(engine, request("e", outputs=outputs, **inputs)) for inputs, outputs, _ in asked]
            expected_runs = Counter()
            for one, (_, _, leaves) in zip(pending, asked, strict=True):
                if leaves:
                    one.ticket.cancel()
            cancelled = any(leaves for _, _, leaves in asked)
            for one, (inputs, outputs, leaves) in zip(pending, asked, strict=True):
                if leaves:
                    continue
                expected, executed = evaluate(graph, inputs, outputs or graph.outputs)
                expected_runs += executed
                answer = await one.answer()
                assert answer.status == Status.OK, answer.text
                found = {each.name: answer.array(each.name).tolist() for each in answer.response.outputs}
                assert found == {name: value.tolist() for name, value in expected.items()}
            for name in KINDS:
                count = engine.model(name).statistics().inference_stats.success.count
                # an answer that is complete ends the steps that it does not need any more
                assert count <= expected_runs[name] or cancelled
            for one, (_, _, leaves) in zip(pending, asked, strict=True):
                assert len(one.answers) == (0 if leaves else 1)
    assert not any(live_counters().values())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_random_graphs_do_what_the_plain_model_says(data):
    graph = data.draw(graphs())
    asked = data.draw(st.lists(questions(graph), min_size=1, max_size=8))
    asyncio.run(check(graph, asked))
