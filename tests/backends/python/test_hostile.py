"""A worker that breaks the protocol can only have itself ended, with a line in the log that names the rule.

Each script is what one such worker does after it is ready. The server stays as it was: the request is answered, other
models are not disturbed, the next worker serves, and no memory remains lent.
"""

import asyncio
import contextlib
import logging

import psutil
import pytest

from inferd.backends.python.arenas import arena_of
from tests.backends.python.hostile import environment
from tests.backends.python.served import CONFIG, MISCHIEF, add_model, ask, serving
from tests.backends.python.test_decoupled import DECOUPLED, Client
from tests.engine.serving import infer_all, request, row

UNAVAILABLE, INTERNAL = 14, 13

MISFIT = "sent a packet that does not fit its head"
ELSEWHERE = "sent a packet that lies where it may not"
UNREADABLE = "sent a response that cannot be read"
NOT_DONE = "sent neither DONE of its batch nor ALLOCATE"

ON_WORK = {
    "done of another batch": ("batch.id += 1; worker.done(batch, ok(7))", NOT_DONE),
    "another kind": ("worker.send(worker.work, p.HELLO, number=p.VERSION)", NOT_DONE),
    "less than a head": ("worker.work.send(b'short')", NOT_DONE),
    "less than the head says": ("worker.send(worker.work, p.DONE, b'torn', size=400, number=batch.id)", NOT_DONE),
    "done outside of its grants": (
        "worker.send(worker.work, p.DONE, flags=p.IN_ARENA, offset=ANY, size=100, number=batch.id)", ELSEWHERE),
    "done in the grant of another socket": (
        "at = worker.allocate(worker.side, 4096)\n"
        "worker.send(worker.work, p.DONE, flags=p.IN_ARENA, offset=at, size=100, number=batch.id)", ELSEWHERE),
    "done beyond the end of a grant": (
        "at = worker.allocate(worker.work, 4096)\n"
        "worker.send(worker.work, p.DONE, flags=p.IN_ARENA, offset=at, size=4097, number=batch.id)", ELSEWHERE),
    "too few responses": ("worker.done(batch)", UNREADABLE),
    "a torn response": ("worker.done(batch, ok(7)[:30])", UNREADABLE),
    "a response of no size": ("worker.done(batch, tensor(b'', total=0))", UNREADABLE),
    "more outputs than there are": ("worker.done(batch, tensor(b'12345678', count=2))", UNREADABLE),
    "an unknown status": ("worker.done(batch, status(200))", UNREADABLE),
    "a text that is longer than the packet": ("worker.done(batch, tensor(b'', text_size=1 << 31))", UNREADABLE),
    "wishes whose answers it does not read": (
        "while True: worker.send(worker.work, p.ALLOCATE, offset=4096)", "asks for memory without reading the answers"),
    "an answer after the end": (
        "worker.respond(number, ok(7), p.FINAL); worker.allocate(worker.side, 1); worker.done(batch, ok(7))",
        "answered a request that its sender had ended"),
    "an answer after another": (
        "worker.respond(number, ok(7)); worker.allocate(worker.side, 1); worker.done(batch, ok(7))",
        "answered a request that its sender had answered"),
    "released but not kept": (
        "worker.send(worker.side, p.RELEASE, number=batch.id); worker.allocate(worker.side, 1)\n"
        "worker.done(batch, ok(7))", "released the memory of a batch that it had not kept"),
}  # fmt: skip

ON_SIDE = {
    "nothing": ("worker.side.send(b'')", "sent a packet without a head"),
    "less than a head": ("worker.side.send(b'short')", "sent a packet without a head"),
    "less than the head says": ("worker.send(worker.side, p.RESPONSE, b'x', size=9, number=number)", MISFIT),
    "an unknown kind": ("worker.send(worker.side, 99)", "sent a packet of an unknown kind"),
    "a kind of the other direction": ("worker.send(worker.side, p.EXECUTE)", "sent a packet of an unknown kind"),
    "a response to nothing": ("worker.respond(12345 << 16 | 9999, ok(7))",
                              "answered a request that it was never given"),
    "a response to what comes later": ("worker.respond(number + (1 << 16), ok(7))",
                                       "answered a request that it was never given"),
    "an empty response that is none": ("worker.send(worker.side, p.RESPONSE, flags=p.EMPTY, number=number)",
                                       "sent an empty response that is not final"),
    "two ends": ("worker.respond(number, ok(7), p.FINAL); worker.respond(number, flags=p.FINAL)",
                 "ended a request twice"),
    "a torn response": ("worker.respond(number, ok(7)[:30])", UNREADABLE),
    "a response outside of its grants": (
        "worker.send(worker.side, p.RESPONSE, flags=p.IN_ARENA, offset=ANY, size=64, number=number)", ELSEWHERE),
    "a response in a grant that is spent": (
        "at = worker.allocate(worker.side, 4096); worker.memory[at:at + 64] = bytes(64)\n"
        "worker.send(worker.side, p.FREE, offset=at)\n"
        "worker.send(worker.side, p.RESPONSE, flags=p.IN_ARENA, offset=at, size=64, number=number)", ELSEWHERE),
    "a grant given back twice": (
        "at = worker.allocate(worker.side, 1)\nfor _ in range(2): worker.send(worker.side, p.FREE, offset=at)",
        "gave back memory that it does not have"),
    "a batch released twice": ("for _ in range(2): worker.send(worker.side, p.RELEASE, number=batch.id)",
                               "released memory that it does not have"),
    "a batch released that never was": ("worker.send(worker.side, p.RELEASE, number=77)",
                                        "released memory that it does not have"),
    "a message released that never was": ("worker.send(worker.side, p.RELEASE, offset=ANY)",
                                          "released memory that it does not have"),
    "wishes whose answers it does not read": (
        "while True: worker.send(worker.side, p.ALLOCATE, offset=4096)", "does not read what it is sent"),
    "a call outside of its grants": (
        "worker.send(worker.side, p.BLS_REQUEST, flags=p.IN_ARENA, offset=ANY, size=64, number=1)", ELSEWHERE),
    "a question that is none": ("worker.send(worker.side, p.CALL, p.CALL_HEAD.pack(6) + b'[1, 2', number=1)",
                                "sent a packet that cannot be read"),
    "a metric that is none": ("worker.send(worker.side, p.METRIC, b'7')", "sent a packet that cannot be read"),
    "statistics that are none": ("worker.send(worker.side, p.STATISTICS, b'1234', code=1)",
                                 "sent statistics that cannot be read"),
    "statistics of an unknown kind": ("worker.send(worker.side, p.STATISTICS, bytes(24), code=4)",
                                      "sent statistics that cannot be read"),
    "questions without end": (
        "while True: worker.send(worker.side, p.CALL, ask(call='is_model_ready', name='calm'), number=1)",
        "does not read what it is sent"),
}  # fmt: skip

ON_CALLS = {
    "nothing": ("worker.calls.send(b'')", "sent a packet without a head"),
    "a call without a head": ("worker.send(worker.calls, p.BLS_REQUEST, b'1234', number=1)",
                              "sent a call that cannot be read"),
    "a call of more bytes than it has": ("worker.send(worker.calls, p.BLS_REQUEST, call(b'', size=9), number=1)",
                                         "sent a call that cannot be read"),
    "two calls of one number": (
        "for _ in range(2): worker.send(worker.calls, p.BLS_REQUEST, call(OWN), number=1)",
        "made two calls of one number"),
    "credit for nothing": (
        "worker.send(worker.calls, p.BLS_REQUEST, call(OWN), number=1)\n"
        "worker.send(worker.calls, p.BLS_CREDIT, number=1, offset=1)",
        "gave back more responses of a call than it had got"),
    "another kind": ("worker.send(worker.calls, p.DONE)", "sent a packet of an unknown kind on the socket of calls"),
    "calls whose answers it does not read": (
        "n = 0\nwhile True:\n    n += 1; worker.send(worker.calls, p.BLS_REQUEST, call(b''), number=n)",
        "does not read what it is sent"),
}  # fmt: skip


def add_hostile(root, script, config=CONFIG):
    place = environment(root / "m" / "environment", script)
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{place}" }} }}'
    add_model(root, "m", "", config + parameter)


@pytest.mark.parametrize(
    ("script", "rule"),
    [
        pytest.param(*case, id=f"{socket}: {name}", marks=[pytest.mark.long] * (name == "questions without end"))
        for socket, cases in (("work", ON_WORK), ("side", ON_SIDE), ("calls", ON_CALLS))
        for name, case in cases.items()
    ],
)
async def test_a_worker_that_breaks_a_rule_is_ended(tmp_path, caplog, script, rule):
    caplog.set_level(logging.INFO, "inferd.python")
    add_hostile(tmp_path, f"batch = worker.batch()\nnumber = batch.numbers[0]\n{script}\n")
    add_model(
        tmp_path, "calm", "", CONFIG.replace("python", "identity")
    )  # of another backend: the server has time for it
    async with serving(tmp_path) as engine:
        used = arena_of("m").used
        asked = asyncio.ensure_future(ask(engine, 1))
        assert (await ask(engine, 3, model="calm")).array().tolist() == [[3]]
        answer = await asked
        assert answer.status == UNAVAILABLE
        assert answer.text.endswith(f"its worker was ended because it {rule}")
        assert (await ask(engine, 1)).array().tolist() == [[7]]
        assert any(f"because it {rule}; another is started" in record.getMessage() for record in caplog.records)
        assert arena_of("m").used <= used


async def test_a_request_answered_on_both_sockets_at_once(tmp_path):
    script = """
    while True:
        batch = worker.batch()
        worker.respond(batch.numbers[0], ok(1))
        worker.done(batch, ok(2))
    """
    for attempt in range(5):
        root = tmp_path / str(attempt)
        root.mkdir()
        add_hostile(root, script)
        async with serving(root) as engine:
            answer = await ask(engine, 1)
            assert answer.status in (0, UNAVAILABLE)


async def test_responses_beyond_their_credit(tmp_path):
    script = """
    batch = worker.batch()
    worker.done(batch, status(p.STATUS_OPEN))
    while True:
        worker.respond(batch.numbers[0], ok(7))
    """
    add_hostile(tmp_path, script, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(1)))
        last = (await client.rest())[-1]
        await client.close()
        assert last.error_message.endswith("its worker was ended because it sent more responses than it had credit for")


async def test_a_batch_that_fails_when_a_sender_has_ended_one_of_its_requests(tmp_path):
    """The others get the error, and the worker lives: it says so where an error for each does not fit into a packet."""
    add_hostile(tmp_path, """
    batch = worker.batch()
    while len(batch.numbers) < 2:  # until both have come together
        worker.done(batch, *[ok(7) for _ in batch.numbers])
        batch = worker.batch()
    worker.respond(batch.numbers[0], ok(1), p.FINAL)
    worker.allocate(worker.side, 1)  # so that it is read
    worker.send(worker.work, p.DONE, b"no memory", flags=p.FAILED, code=p.CODE_INTERNAL, number=batch.id)
    worker.serve()
    """, CONFIG + "dynamic_batching { max_queue_delay_microseconds: 100000 }")  # fmt: skip
    async with serving(tmp_path) as engine:
        answers = []
        while not any(answer.status for answer in answers):
            answers = await infer_all(engine, request(x=row(1)), request(x=row(2)))
        assert [answer.array().tolist() for answer in answers if answer.status == 0] == [[[1]]]
        assert [answer.text for answer in answers if answer.status] == ["no memory"]
        assert (await ask(engine, 3)).array().tolist() == [[7]]


async def test_memory_released_before_its_batch_is_done(tmp_path):
    """DONE and RELEASE come by two sockets, which two threads read: either may be first."""
    script = """
    while True:
        batch = worker.batch()
        worker.send(worker.side, p.RELEASE, number=batch.id)
        worker.allocate(worker.side, 1)  # so that it is read
        worker.done(batch, *[ok(7) for _ in batch.numbers], flags=p.KEPT)
    """
    add_hostile(tmp_path, script)
    async with serving(tmp_path) as engine:
        for _ in range(3):
            assert (await ask(engine, *range(100_000))).status == 0
        assert arena_of("m").used < 100_000 * 8  # the flags, and the grants of one byte


@pytest.mark.parametrize("place", ["ARENA", "CUDA", "REGION", "INPUT", "INPUT + 1", "INPUT + (1 << 31)"])
async def test_an_output_that_lies_where_it_may_not(tmp_path, place):
    """In the arena, on a GPU, in shared memory of a client that has named none, behind an input or in none."""
    add_hostile(tmp_path, f"""
    while True:
        batch = worker.batch()
        worker.done(batch, tensor(b"", place=p.{place}, at=ANY, size=8))
    """)  # fmt: skip
    async with serving(tmp_path) as engine:
        answer = await ask(engine, 1)
        assert (answer.status, answer.text) == (INTERNAL, "output 'y' lies where the worker may not put it")


async def test_grants_are_as_many_as_are_served(tmp_path):
    """A worker that asks for memory again and again is refused, and lives."""
    add_hostile(tmp_path, """
    while True:
        batch = worker.batch()
        refused = 0
        while worker.allocate(worker.side, 1 << 20) >= 0:
            refused += 1
        worker.done(batch, ok(refused))
    """)  # fmt: skip
    async with serving(tmp_path) as engine:
        answer = await ask(engine, 1)
        assert answer.array().tolist() == [[16384]]


async def test_calls_under_way_are_as_many_as_are_served(tmp_path):
    """A worker that calls without end is refused what is too much, and lives: the other calls wait for the model."""
    add_hostile(tmp_path, """
    while True:
        batch = worker.batch()
        for number in range(1, 4096 + 6):
            worker.send(worker.calls, p.BLS_REQUEST, call(OWN), number=number)
        refused = []
        while len(refused) < 5:
            kind, flags, code, number, _, text = worker.receive(worker.calls)
            assert (kind, flags, code) == (p.BLS_RESPONSE, p.FAILED | p.FINAL, p.CODE_UNAVAILABLE), text
            refused.append(number)
        worker.done(batch, ok(min(refused)))
        worker.serve()
    """)  # fmt: skip
    async with serving(tmp_path) as engine:
        answer = await ask(engine, 1)
        assert (answer.status, answer.text) == (0, "")
        assert answer.array().tolist() == [[4097]]


@pytest.mark.parametrize("seed", range(4))
async def test_packets_at_random(tmp_path, seed):
    """Each request gets one answer, and the other model does not notice."""
    add_hostile(tmp_path, f"worker.storm({seed})")
    async with serving(tmp_path, calm=MISCHIEF) as engine:
        for value in range(6):
            hostile, calm = await asyncio.gather(ask(engine, value), ask(engine, value, model="calm"))
            assert calm.array().tolist() == [[value]]
            assert hostile.status in (0, INTERNAL, UNAVAILABLE)


async def test_a_supervisor_that_is_stopped_does_its_work(tmp_path):
    add_hostile(tmp_path, "worker.batch(); worker.side.send(b'short')")
    async with serving(tmp_path) as engine:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # another one, that has just ended
                if child.cmdline()[-1:] == ["m_0_0"]:
                    child.suspend()
        assert (await ask(engine, 1)).status == UNAVAILABLE
        assert (await ask(engine, 1)).array().tolist() == [[7]]
