"""Guards which idle instance gets what, and when, in a real engine (the dispatcher: `tests.native.test_dispatcher`).

Every execution waits at a gate. Delays are either short, where the test waits for them to pass, or longer than any
test, where a request is to leave for another reason.
"""

import pytest

from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.resources import Resources
from inferd.server.errors import Status
from tests.engine.serving import CONFIG, Gate, Pending, echo, request, row, serving

OK, UNAVAILABLE = Status.OK, Status.UNAVAILABLE
LONG = 600_000_000  # of a delay, in microseconds


pytestmark = pytest.mark.usefixtures("native_counters")


def config(batching: str, *, max_batch_size: int = 8, group: str = "{ kind: KIND_CPU count: 1 }") -> str:
    return (
        CONFIG.replace("dynamic_batching { }", f"dynamic_batching {{ {batching} }}")
        .replace("max_batch_size: 8", f"max_batch_size: {max_batch_size}")
        .replace("instance_group { kind: KIND_CPU count: 1 }", f"instance_group {group}")
    )


def rows(count: int, *, timeout_us: int = 0):
    """A request of so many rows."""
    message = request(x=row(0).repeat(count, axis=0))
    if timeout_us:
        message.parameters["timeout"].int64_param = timeout_us
    return message


class Named(Gate):
    """A gate that notes which instances come."""

    def __init__(self) -> None:
        self.names: list[str] = []
        super().__init__()

    def __call__(self, batch):
        self.names.append(batch.instance_name)
        super().__call__(batch)


async def test_each_of_many_instances_is_used_with_a_delay(tmp_path):
    gate = Named()
    text = config("max_queue_delay_microseconds: 1000", group="{ kind: KIND_CPU count: 8 }")
    async with serving(tmp_path, gate, m=text) as engine:
        for _ in range(2):  # all have waited for the delay when the second round begins
            pending = []
            for _ in range(8):
                pending.append(Pending(engine, rows(1)))
                await gate.entered()
            assert len(set(gate.names)) == 8
            gate.names.clear()
            gate.go(8)
            assert {(await each.answer()).status for each in pending} == {OK}


async def test_an_instance_that_lacks_resources_does_not_keep_a_request_from_another(tmp_path):
    """They wait in the queue, where another instance of the model takes them."""
    held, gate = Gate(), Named()

    def group(name: str, resource: str, count: int = 1) -> str:
        limiter = f'rate_limiter {{ resources {{ name: "{resource}" count: 1 }} }}'
        return f'{{ name: "{name}" kind: KIND_CPU count: {count} {limiter} }}'

    models = {
        "holder": config("", max_batch_size=1, group=group("holder", "scarce")),
        "m": config("", max_batch_size=1, group=f"[ {group('poor', 'scarce', 4)}, {group('rich', 'plenty')} ]"),
    }
    hardware = Hardware(resources=Resources({("scarce", None): 1, ("plenty", None): 1}))
    async with serving(tmp_path, {"holder": held, "m": gate}, hardware=hardware, **models) as engine:
        holder = Pending(engine, request("holder", x=row(0)))
        await held.entered()
        for _ in range(4):
            each = Pending(engine, rows(1))
            await gate.entered()
            gate.go()
            assert (await each.answer()).status == OK
        assert gate.names == ["rich_0"] * 4
        held.go()
        assert (await holder.answer()).status == OK


@pytest.mark.parametrize(
    ("preferred", "delay", "sizes", "batches"),
    [
        ("[ 4, 6 ]", 0, [1] * 7, [6, 1]),
        ("[ 4, 6 ]", 0, [1] * 5, [4, 1]),
        ("[ 2, 6 ]", LONG, [3, 4, 2], [3, 6]),
        ("[ 2, 6 ]", LONG, [7, 2], [7, 2]),
        ("[ 4, 6 ]", 50_000, [1] * 7, [6, 1]),
        ("[ 4 ]", LONG, [8], [8]),
    ],
)
async def test_preferred_sizes_are_triton_s(tmp_path, preferred, delay, sizes, batches):
    """`GetDynamicBatch` of Triton's dynamic_batch_scheduler.cc; one instance is busy until all have come."""
    gate = Gate()
    text = config(f"preferred_batch_size: {preferred} max_queue_delay_microseconds: {delay}")
    async with serving(tmp_path, gate, m=text) as engine:
        first = Pending(engine, rows(8))
        await gate.entered()
        pending = [Pending(engine, rows(size)) for size in sizes]
        gate.go(100)
        for each in (first, *pending):
            assert (await each.answer()).status == OK
        assert [size for _, size in gate.batches] == [8, *batches]


async def test_once_the_delay_is_over_everything_goes(tmp_path):
    """All waiting requests go, also beyond a preferred size."""
    gate = Gate()
    text = config("preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 1")
    async with serving(tmp_path, gate, m=text) as engine:
        first = Pending(engine, rows(8))
        await gate.entered()
        pending = [Pending(engine, rows(1)) for _ in range(5)]
        gate.go(100)
        for each in (first, *pending):
            assert (await each.answer()).status == OK
        assert [size for _, size in gate.batches] == [8, 5]


async def test_oldest_sequences_are_batched_by_the_same_rule(tmp_path):
    gate = Gate()
    scheduler = """sequence_batching { oldest { max_candidate_sequences: 16 preferred_batch_size: [ 4, 6 ] }
                   max_sequence_idle_microseconds: 60000000 }"""
    text = CONFIG.replace("dynamic_batching { }", scheduler)
    async with serving(tmp_path, gate, m=text) as engine:

        def asked(sequence: int, count: int = 1):
            message = rows(count)
            message.parameters["sequence_id"].int64_param = sequence
            message.parameters["sequence_start"].bool_param = True
            message.parameters["sequence_end"].bool_param = True
            return message

        first = Pending(engine, asked(100, 8))
        await gate.entered()
        pending = [Pending(engine, asked(number)) for number in range(1, 8)]
        gate.go(100)
        for each in (first, *pending):
            assert (await each.answer()).status == OK
        assert [size for _, size in gate.batches] == [8, 6, 1]


@pytest.mark.parametrize("end", ["timeout", "cancelled"])
async def test_what_a_departure_leaves_behind_may_be_a_batch(tmp_path, end):
    """One row and two requests of two: without the first the others are a preferred four."""
    gate = Gate()
    policy = "default_queue_policy { allow_timeout_override: true }"
    text = config(f"preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: {LONG} {policy}")
    async with serving(tmp_path, gate, m=text) as engine:
        first = Pending(engine, rows(1, timeout_us=20_000 if end == "timeout" else 0))
        others = [Pending(engine, rows(2)) for _ in range(2)]
        assert gate.batches == []
        gate.go(1)
        if end == "cancelled":
            first.ticket.cancel()
        else:
            assert (await first.answer()).status == UNAVAILABLE
        for each in others:
            assert (await each.answer()).status == OK
        assert gate.batches == [(2, 4)]


SEQUENCES = f"""
backend: "puppet"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_INT64 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_INT64 dims: [ -1 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
sequence_batching {{
  max_sequence_idle_microseconds: {LONG}
  oldest {{ max_candidate_sequences: 8 preferred_batch_size: [ 4 ] max_queue_delay_microseconds: {LONG} }}
}}
"""


DELAYING = {
    "delay": config(f"max_queue_delay_microseconds: {LONG}"),
    "preferred": config(f"preferred_batch_size: [ 4 ] max_queue_delay_microseconds: {LONG}"),
    "oldest": SEQUENCES,
    "direct": SEQUENCES.replace("oldest {", "direct {")
    .replace("max_candidate_sequences: 8 preferred_batch_size: [ 4 ]", "")
    .replace("max_queue", "minimum_slot_utilization: 0.9 max_queue"),
}


async def test_a_delay_ends_before_a_client_gives_up(tmp_path):
    """The same where the instance already waits for more requests, and would wait longer than the client."""
    models = {f"{kind} {way}": text for kind, text in DELAYING.items() for way in ("begins a wait", "joins a wait")}
    gates = {name: Gate() for name in models}

    def asked(model: str, sequence: int):
        message = request(model, x=row(0))
        if "sequence_batching" in models[model]:
            message.parameters["sequence_id"].int64_param = sequence
            message.parameters["sequence_start"].bool_param = True
        return message

    async with serving(tmp_path, gates, **models) as engine:
        for gate in gates.values():
            gate.go(100)
        patient = [Pending(engine, asked(name, 1)) for name in models if "joins" in name]
        hasty = [Pending(engine, asked(name, 2), 4_000_000_000) for name in models]
        for each in (*hasty, *patient):
            assert (await each.answer()).status == OK
    batches = {name: [count for count, _ in gate.batches] for name, gate in gates.items()}
    assert batches == {name: [1 + ("joins" in name)] for name in models}


async def test_resources_are_shared_by_priority(tmp_path):
    """Two models that always have requests, and one resource: three executions of one for each of the other."""
    order: list[str] = []

    def note(batch):
        order.append(batch.instance_name)
        echo(batch)

    gate = Gate(note)

    def group(priority: int) -> str:
        return f'{{ kind: KIND_CPU rate_limiter {{ priority: {priority} resources {{ name: "R" count: 1 }} }} }}'

    models = {
        "often": config("", max_batch_size=1, group=group(1)),
        "seldom": config("", max_batch_size=1, group=group(3)),
    }
    hardware = Hardware(resources=Resources({("R", None): 1}))
    async with serving(tmp_path, gate, hardware=hardware, **models) as engine:
        pending = [Pending(engine, request("often", x=row(0)))]
        await gate.entered()
        for model, count in (("often", 120), ("seldom", 40)):
            pending += [Pending(engine, request(model, x=row(0))) for _ in range(count)]
        gate.go(1000)
        for each in pending:
            assert (await each.answer()).status == OK
        contended = order[: 1 + 120]
        assert abs(contended.count("often_0_0") - 90) <= 6
        assert hardware.resources.waiting == 0
