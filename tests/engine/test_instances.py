"""Guards instances in a real engine: how many, where they run, what limits them, and changing their number live."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from inferd._native.scheduling.queue import QueueLane
from inferd.backends.api import BackendError
from inferd.server.engine.instances.hosts import HostPolicy, HostPolicyError, parse_host_policies
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.resources import ResourceError, Resources, parse_limits
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from inferd.server.errors import ServerError, Status
from tests.engine.serving import (
    CONFIG,
    Gate,
    Pending,
    PuppetModel,
    echo,
    infer,
    infer_all,
    puppets_of,
    request,
    row,
    scale,
    serving,
)
from tests.waiting import until

EXPLICIT = ModelControl(ControlMode.EXPLICIT, (ALL,))
OK, UNAVAILABLE, DEADLINE = Status.OK, Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED


pytestmark = pytest.mark.usefixtures("native_counters")


def config(group: str, *, max_batch_size: int = 1) -> str:
    return CONFIG.replace("instance_group { kind: KIND_CPU count: 1 }", f"instance_group {group}").replace(
        "max_batch_size: 8", f"max_batch_size: {max_batch_size}"
    )


class Census:
    """Which instances have executed, and on which threads; each execution waits at the gate."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.names: list[str] = []
        self.cores: list[frozenset[int]] = []
        self.threads: set[int] = set()

    def __call__(self, batch):
        self.names.append(batch.instance_name)
        self.cores.append(frozenset(os.sched_getaffinity(0)))
        self.threads.add(threading.get_ident())
        self.gate(batch)

    async def busy(self, engine, count: int) -> list[Pending]:
        """Have so many instances execute at once."""
        pending = [Pending(engine, request(x=row(n))) for n in range(count)]
        for _ in pending:
            await self.gate.entered()
        return pending


@pytest.fixture
def late(monkeypatch):
    """Instances get their threads with the first request; the names of those that have."""
    started: list[str] = []
    start = threading.Thread.start

    def note(thread):
        start(thread)
        started.append(thread.name)

    monkeypatch.setattr(threading.Thread, "start", note)
    monkeypatch.setattr(PuppetModel, "any_thread", True)
    return lambda: sorted(name for name in started if name.startswith("m_0"))


def refuse_threads(monkeypatch, times):
    """The system has no thread for instances, so many times."""
    start, left = threading.Thread.start, [times]

    def refusing(thread):
        if thread.name.startswith("m_0") and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


# -- threads that come with the first request --


async def test_instances_get_their_threads_with_the_first_request(tmp_path, late):
    async with serving(tmp_path, echo, m=config("{ kind: KIND_CPU count: 3 }", max_batch_size=8)) as engine:
        assert late() == []
        answers = await infer_all(engine, *(request(x=row(n)) for n in range(20)))
        assert [answer.array().item() for answer in answers] == list(range(20))
        assert (await infer(engine, request(x=row(7)))).array().item() == 7
        await until(lambda: late() == ["m_0_0", "m_0_1", "m_0_2"])
    assert sorted(puppets_of(engine).closed) == ["m", "m_0_0", "m_0_1", "m_0_2"]


@pytest.mark.parametrize(
    "group", ["count: 1 host_policy: 'mine'", "count: 1 passive: true } instance_group { count: 1"]
)
async def test_others_have_their_threads_from_the_start(tmp_path, late, group):
    async with serving(tmp_path, echo, m=config(f"{{ kind: KIND_CPU {group} }}")) as engine:
        assert "m_0_0" in late()
        assert (await infer(engine, request(x=row(1)))).status == OK


async def test_the_number_of_instances_changes_before_the_first_request(tmp_path, late):
    async with serving(tmp_path, echo, control=EXPLICIT, m=config("{ kind: KIND_CPU count: 1 }")) as engine:
        await scale(engine, tmp_path, 3)
        await scale(engine, tmp_path, 2)
        assert late() == []
        assert puppets_of(engine).closed == ["m_0_2"]
        assert (await infer(engine, request(x=row(1)))).status == OK
        await until(lambda: late() == ["m_0_0", "m_0_1"])
        await scale(engine, tmp_path, 3)
        assert late() == ["m_0_0", "m_0_1", "m_0_2"], "who comes later has its thread at once"


async def test_requests_wait_while_the_system_has_no_thread(tmp_path, late, monkeypatch, caplog):
    monkeypatch.setattr("inferd.server.engine.instances.instances.RETRY_SECONDS", 0.01)
    async with serving(tmp_path, echo, m=config("{ kind: KIND_CPU count: 2 }")) as engine:
        refuse_threads(monkeypatch, 3)
        answers = await infer_all(engine, *(request(x=row(n)) for n in range(4)))
        assert [answer.array().item() for answer in answers] == list(range(4))
        told = [each.message for each in caplog.records if "wait" in each.message]
        assert told[0].startswith("requests for model 'm' wait: instance m_0_0: the system has no thread for it")
        assert len(told) == 3


async def test_what_waits_for_a_thread_is_executed_when_the_model_is_unloaded(tmp_path, late, monkeypatch):
    """No accepted request is lost, and an instance that never had a request is closed."""
    refuse_threads(monkeypatch, -1)
    async with serving(tmp_path, echo, control=EXPLICIT, m=config("{ kind: KIND_CPU count: 2 }")) as engine:
        pending = [Pending(engine, request(x=row(n))) for n in range(5)]
        late_one = Pending(engine, request(x=row(9)), timeout_ns=1)
        assert (await late_one.answer()).status == DEADLINE
        await engine.unload("m")
        for number, each in enumerate(pending):
            assert (await each.answer()).array().item() == number
    assert sorted(puppets_of(engine).closed) == ["m", "m_0_0", "m_0_1"]


# -- the number of instances --


async def test_instances_that_have_begun_end_before_their_model_where_another_has_no_thread(tmp_path, monkeypatch):
    """The system may refuse a thread at any time; the load fails, and nothing of it is left."""
    start = threading.Thread.start

    def refusing(thread):
        if thread.name == "m_0_2":
            raise RuntimeError("can't start new thread")
        start(thread)

    control = ModelControl(ControlMode.EXPLICIT)
    async with serving(tmp_path, echo, control=control, m=config("{ kind: KIND_CPU count: 4 }")) as engine:
        monkeypatch.setattr(threading.Thread, "start", refusing)
        with pytest.raises(ServerError, match="m_0_2: the system has no thread for it"):
            await engine.load("m")
        monkeypatch.undo()
        closed = puppets_of(engine).closed
        assert sorted(closed[:-1]) == ["m_0_0", "m_0_1"]
        assert closed[-1] == "m"
        await engine.load("m")
        assert (await infer(engine, request(x=row(1)))).status == OK


async def test_more_and_fewer_instances_while_requests_run(tmp_path):
    census = Census()
    async with serving(tmp_path, census, control=EXPLICIT, m=config("{ kind: KIND_CPU count: 1 }")) as engine:
        first = await census.busy(engine, 1)
        await scale(engine, tmp_path, 3)
        more = await census.busy(engine, 2)
        assert sorted(census.names) == ["m_0_0", "m_0_1", "m_0_2"]
        assert engine.model("m").config.instance_group[0].count == 3
        waiting = [Pending(engine, request(x=row(n))) for n in range(5)]
        fewer = asyncio.create_task(scale(engine, tmp_path, 1))
        await asyncio.sleep(0)
        census.gate.go(1000)
        await fewer  # those that end have finished what they executed
        for each in (*first, *more, *waiting):
            assert (await each.answer()).status == OK, "nothing accepted is lost"
        census.names.clear()
        assert [(await infer(engine, request(x=row(n)))).status for n in range(3)] == [OK] * 3
        assert set(census.names) == {"m_0_0"}
        assert len(engine.model("m").spec.instances) == 1


async def test_a_number_that_cannot_be_changes_nothing(tmp_path):
    async with serving(tmp_path, echo, control=EXPLICIT, m=config("{ kind: KIND_CPU count: 2 }")) as engine:
        with pytest.raises(ServerError, match="at most 1024"):
            await scale(engine, tmp_path, 5000)
        assert len(engine.model("m").spec.instances) == 2
        assert (await infer(engine, request(x=row(1)))).status == OK


def refuse_instance(monkeypatch, name, error=BackendError):
    """The instance of this name cannot be made."""
    made = PuppetModel.create_instance

    def create_instance(self, spec):
        if spec.name == name:
            raise error("no room")
        return made(self, spec)

    monkeypatch.setattr(PuppetModel, "create_instance", create_instance)


@pytest.mark.parametrize("error", [BackendError, RuntimeError])
async def test_a_further_instance_that_cannot_be_made_changes_nothing(tmp_path, monkeypatch, caplog, error):
    """Guards the load, which says so whatever the backend raises, and the next one."""
    refuse_instance(monkeypatch, "m_0_2", error)
    async with serving(tmp_path, echo, control=EXPLICIT, m=config("{ kind: KIND_CPU count: 1 }")) as engine:
        with pytest.raises(ServerError, match=r"load failed for model 'm': version 1 is .*no room"):
            await scale(engine, tmp_path, 3)
        caplog.clear()  # frames of the logged errors hold what they were about
        assert len(engine.model("m").spec.instances) == 1
        assert (await infer(engine, request(x=row(1)))).status == OK
        await scale(engine, tmp_path, 2)
        assert len(engine.model("m").spec.instances) == 2


async def test_an_instance_that_cannot_be_made_fails_the_load_of_sequences(tmp_path, monkeypatch):
    """The others are closed: nobody waits for ever for instances that wait for requests."""
    refuse_instance(monkeypatch, "m_0_1")
    text = config("{ kind: KIND_CPU count: 2 }").replace("dynamic_batching { }", "sequence_batching { }")
    with pytest.raises(AssertionError, match="no room"):
        async with serving(tmp_path, echo, m=text):
            pass


async def test_idle_instances_that_wait_for_resources_can_end(tmp_path):
    census = Census()
    resource = 'resources { name: "R" count: 1 }'
    hardware = Hardware(resources=Resources({("R", None): 1}))
    async with serving(
        tmp_path, census, hardware=hardware, control=EXPLICIT, m=limited("m", resource, count=2)
    ) as engine:
        pending = await census.busy(engine, 1)
        pending.append(Pending(engine, request(x=row(1))))
        for _ in range(100_000):
            if hardware.resources.waiting:
                break
            await asyncio.sleep(0)
        fewer = asyncio.create_task(scale(engine, tmp_path, 1))
        await asyncio.sleep(0)
        census.gate.go(1000)
        await fewer
        for each in pending:
            assert (await each.answer()).status == OK


async def test_passive_instances_are_made_and_get_no_requests(tmp_path):
    census = Census()
    group = '[ { name: "active" kind: KIND_CPU }, { name: "spare" kind: KIND_CPU passive: true } ]'
    async with serving(tmp_path, census, m=config(group)) as engine:
        census.gate.go(1000)
        await infer_all(engine, *(request(x=row(n)) for n in range(8)))
        assert set(census.names) == {"active_0"}


# -- where they run --


def test_host_policies_are_read():
    entries = ["gpu_0,numa-node=1", "gpu_0,cpu-cores=0-2,5", "cpu,cpu-cores=3"]
    assert parse_host_policies(entries) == {
        "gpu_0": HostPolicy("gpu_0", 1, frozenset({0, 1, 2, 5})),
        "cpu": HostPolicy("cpu", None, frozenset({3})),
    }


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "cpu",
        "cpu,",
        "cpu,numa-node=x",
        "cpu,cpu-cores=",
        "cpu,cpu-cores=1-",
        ",numa-node=0",
        "cpu,x=1",
        "cpu,cpu-cores=0,3-1",
        "cpu,cpu-cores=0-999999999999",
        "cpu,numa-node=999999",
    ],
)
def test_a_wrong_host_policy_is_refused(entry):
    with pytest.raises(HostPolicyError, match="expected NAME,numa-node=N or NAME,cpu-cores=0-3,8-11"):
        parse_host_policies([entry])


def test_a_setting_given_twice_is_refused():
    with pytest.raises(HostPolicyError, match="each once"):
        parse_host_policies(["a,numa-node=0", "a,numa-node=1"])


async def test_instances_run_on_the_cores_of_their_policy(tmp_path):
    """The usual policy of their kind, or the one that the group names; threads that they start inherit it."""
    mine = sorted(os.sched_getaffinity(0))
    first, last = frozenset(mine[:1]), frozenset(mine[-1:])
    hosts = {"cpu": HostPolicy("cpu", cores=first), "own": HostPolicy("own", cores=last)}
    census = Census()
    group = '[ { name: "a" kind: KIND_CPU }, { name: "b" kind: KIND_CPU host_policy: "own" } ]'
    async with serving(tmp_path, census, hardware=Hardware(hosts), m=config(group)) as engine:
        pending = await census.busy(engine, 2)
        assert dict(zip(census.names, census.cores, strict=True)) == {"a_0": first, "b_0": last}
        census.gate.go(10)
        for each in pending:
            await each.answer()
    assert sorted(os.sched_getaffinity(0)) == mine


async def test_a_policy_that_cannot_be_applied_fails_the_load(tmp_path):
    with pytest.raises(AssertionError, match="host policy 'cpu': cannot run on cores 100000: Invalid argument"):
        async with serving(tmp_path, echo, hardware=Hardware({"cpu": HostPolicy("cpu", cores=frozenset({100000}))})):
            pass


def on_a_thread(policy: HostPolicy) -> Exception | None:
    """What binding a thread to the policy raises."""
    raised: list[Exception] = []

    def bind() -> None:
        try:
            policy.bind()
        except HostPolicyError as error:
            raised.append(error)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_memory_of_a_numa_node():
    """The server binds the memory, or logs why it could not: some containers forbid it."""
    error = on_a_thread(HostPolicy("cpu", numa_node=0))
    if error is not None and "cannot bind memory" in str(error):
        pytest.skip(f"not allowed here: {error}")
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("this machine does not tell its NUMA nodes")
    assert error is None


def test_a_numa_node_that_is_not_there():
    assert "there is no NUMA node 999" in str(on_a_thread(HostPolicy("cpu", numa_node=999)))


# -- the rate limiter --


def limited(name: str, resources: str, *, count: int = 1) -> str:
    return config(f"{{ kind: KIND_CPU count: {count} rate_limiter {{ {resources} }} }}")


def test_limits_are_read():
    assert parse_limits(["R1:3", "R2:2:0", "R1:1:1"]) == {("R1", None): 3, ("R2", 0): 2, ("R1", 1): 1}


@pytest.mark.parametrize("entry", ["", "R", "R:", ":1", "R:x", "R:1:2:3", "R:99999999999999999999"])
def test_a_wrong_limit_is_refused(entry):
    with pytest.raises(ResourceError, match="expected NAME:COUNT or NAME:COUNT:DEVICE"):
        parse_limits([entry])


async def test_instances_execute_only_with_their_resources(tmp_path):
    """Over models; what waits for them stays in the queue, where it can be cancelled and time out."""
    census = Census()
    resource = 'resources { name: "R" global: true count: 2 }'
    models = {name: limited(name, resource) for name in ("a", "b")}
    hardware = Hardware(resources=Resources({("R", None): 3}))
    async with serving(tmp_path, census, hardware=hardware, **models) as engine:
        first = Pending(engine, request("a", x=row(1)))
        await census.gate.entered()
        cancelled, late, second = (
            Pending(engine, request("b", x=row(n)), timeout) for n, timeout in ((2, -1), (3, 1_000_000), (4, -1))
        )
        assert (await late.answer()).status == DEADLINE
        assert engine.model("b").lane.pending == 2
        cancelled.ticket.cancel()
        assert engine.model("b").lane.pending == 1
        assert census.names == ["a_0_0"]
        census.gate.go(1000)
        assert [(await each.answer()).status for each in (first, second)] == [OK, OK]
        assert hardware.resources.waiting == 0


async def test_one_model_waits_for_another_that_it_calls(tmp_path):
    """The instance that holds the resource may need others to go on: who cannot be served must not block them."""
    census = Census()
    models = {
        "caller": limited("caller", 'resources { name: "R" count: 1 }'),
        "greedy": limited("greedy", 'resources { name: "R" count: 2 }'),
        "called": limited("called", 'resources { name: "R" count: 1 }'),
    }
    async with serving(tmp_path, census, hardware=Hardware(resources=Resources({})), **models) as engine:
        caller = Pending(engine, request("caller", x=row(1)))
        await census.gate.entered()
        greedy = Pending(engine, request("greedy", x=row(2)))
        called = Pending(engine, request("called", x=row(3)))
        await census.gate.entered()
        assert census.names == ["caller_0_0", "called_0_0"]
        census.gate.go(1000)
        assert [(await each.answer()).status for each in (caller, greedy, called)] == [OK] * 3


@pytest.mark.parametrize(
    ("limits", "groups", "text"),
    [
        ({("R", None): 1}, {"a": 'resources { name: "R" count: 2 }'}, 'Resource count for "R" is limited to 1'),
        (
            {},
            {"a": 'resources { name: "R" count: 1 }', "b": 'resources { name: "R" global: true count: 1 }'},
            "present as both global and device-specific",
        ),
    ],
)
async def test_resources_that_cannot_be_fail_the_load(tmp_path, limits, groups, text):
    models = {name: limited(name, resources) for name, resources in groups.items()}
    with pytest.raises(AssertionError, match=text):
        async with serving(tmp_path, echo, hardware=Hardware(resources=Resources(limits)), **models):
            pass


async def test_without_the_switch_resources_do_not_matter(tmp_path):
    census = Census()
    resource = 'resources { name: "R" count: 1 }'
    async with serving(tmp_path, census, m=limited("m", resource, count=2)) as engine:
        pending = await census.busy(engine, 2)
        census.gate.go(10)
        for each in pending:
            assert (await each.answer()).status == OK
        assert isinstance(engine.model("m").lane, QueueLane)
