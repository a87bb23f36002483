"""Guards that a model that writes to its inputs changes nobody else's: steps of ensembles, cached and coalesced
answers, tensors that are the same memory, clients.
"""

import asyncio

import numpy as np
import pytest

from inferd.server.caching import LocalCache
from tests.engine.serving import Gate, Pending, infer, infer_all, request, serving
from tests.engine.test_ensembles import add, ensemble, model, parameter, step

WIDE = 4096  # numbers in a row: enough for memory that lies as models like it, so that nothing is copied by accident


pytestmark = pytest.mark.usefixtures("native_counters")


def double(batch):
    """y is 2 x, computed where x lies."""
    x = batch.input("x").numpy()
    x *= 2
    batch.set_output("y", x)


def same(batch):
    """y is x, and its memory, too."""
    batch.set_output("y", batch.input("x").numpy())


same.writes_inputs = False


def wide(number):
    return np.full((1, WIDE), number, np.int64)


def only(answer, name="y"):
    """The one number that the output consists of."""
    [number] = np.unique(answer.array(name))
    return int(number)


def chain(*names, **arguments):
    """Steps of these models, one behind the other; each tensor between them is an output, too."""
    steps = [step(name, {"x": f"t{n}" if n else "x"}, {"y": f"t{n + 1}"}) for n, name in enumerate(names)]
    return ensemble(*steps, outputs=tuple(f"t{n + 1}" for n in range(len(names))), **arguments)


async def test_steps_that_write_in_place(tmp_path):
    models = {"double": double}
    async with serving(tmp_path, models, double=model(), e=chain("double", "double", "double")) as engine:
        answers = await infer_all(engine, *(request("e", x=wide(n)) for n in range(100)))
    assert [[only(answer, f"t{n}") for n in (1, 2, 3)] for answer in answers] == [
        [2 * n, 4 * n, 8 * n] for n in range(100)
    ]


async def test_a_tensor_that_several_steps_write_to(tmp_path):
    config = ensemble(
        step("same", {"x": "x"}, {"y": "t"}),
        *(step("double", {"x": "t"}, {"y": f"y{n}"}) for n in range(3)),
        outputs=("t", "y0", "y1", "y2"),
    )
    models = {"double": double, "same": same}
    async with serving(tmp_path, models, double=model(), same=model(), e=config) as engine:
        for n in range(20):
            answer = await infer(engine, request("e", x=wide(n)))
            assert [only(answer, name) for name in ("t", "y0", "y1", "y2")] == [n, 2 * n, 2 * n, 2 * n]


async def test_inputs_that_are_the_same_tensor(tmp_path):
    def double_and_add(batch):
        a = batch.input("a").numpy()
        a *= 2
        batch.set_output("y", a + batch.input("b").numpy())

    config = ensemble(step("same", {"x": "x"}, {"y": "t"}), step("sum", {"a": "t", "b": "t"}, {"y": "y"}))
    models = {"sum": double_and_add, "same": same}
    async with serving(tmp_path, models, sum=model(inputs=("a", "b")), same=model(), e=config) as engine:
        assert only(await infer(engine, request("e", x=wide(5)))) == 15


async def test_outputs_that_are_the_same_memory(tmp_path):
    def both(batch):
        x = batch.input("x").numpy()
        batch.set_output("y", x)
        batch.set_output("z", x)

    config = ensemble(
        step("both", {"x": "x"}, {"y": "t", "z": "u"}),
        step("double", {"x": "t"}, {"y": "v"}),
        step("sum", {"a": "v", "b": "u"}, {"y": "y"}),
    )
    models = {"both": both, "double": double, "sum": add}
    configs = {"both": model(outputs=("y", "z")), "double": model(), "sum": model(inputs=("a", "b")), "e": config}
    async with serving(tmp_path, models, **configs) as engine:
        assert only(await infer(engine, request("e", x=wide(7)))) == 21


@pytest.mark.parametrize("inner", ["same", "double"])
async def test_a_cached_answer_is_not_written_to(tmp_path, inner):
    caching = model(extra="dynamic_batching { }\nresponse_cache { enable: true }\n")
    models = {inner: same if inner == "same" else double, "outer": double}
    config = chain(inner, "outer")
    expected = (3, 6) if inner == "same" else (6, 12)
    async with serving(
        tmp_path, models, cache=LocalCache(1 << 24), **{inner: caching}, outer=model(), e=config
    ) as engine:
        for _ in range(4):
            answer = await infer(engine, request("e", x=wide(3)))
            assert (only(answer, "t1"), only(answer, "t2")) == expected
        assert engine.model(inner).statistics().inference_stats.cache_hit.count == 3


async def test_a_coalesced_answer_is_not_written_to(tmp_path):
    gate = Gate(same)
    gate.writes_inputs = False
    models = {"first": gate, "outer": double}
    first = model(extra="dynamic_batching { }\n" + parameter("coalesce_requests", "true"))
    async with serving(tmp_path, models, first=first, outer=model(), e=chain("first", "outer")) as engine:
        pending = [Pending(engine, request("e", x=wide(3))) for _ in range(8)]
        await gate.entered()
        gate.go(100)
        assert [only(await each.answer(), "t2") for each in pending] == [6] * 8
        assert len(gate.batches) == 1


async def test_a_question_that_is_executed_is_not_written_to(tmp_path):
    """Others are compared with it while it is executed, and afterwards by the cache."""
    written, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def write_and_wait(batch):
        x = batch.input("x").numpy()
        x *= 2
        loop.call_soon_threadsafe(written.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(30)
        batch.set_output("y", x)

    shared = model(extra="dynamic_batching { }\n" + parameter("coalesce_requests", "true"))
    config = ensemble(step("same", {"x": "x"}, {"y": "t"}), step("m", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {"m": write_and_wait, "same": same}, m=shared, same=model(), e=config) as engine:
        pending = [Pending(engine, request("e", x=wide(3)))]
        await asyncio.wait_for(written.wait(), 30)
        pending += [Pending(engine, request("e", x=wide(3))) for _ in range(3)]
        while engine.model("same").statistics().inference_count < 4:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        go.set()
        assert [only(await each.answer()) for each in pending] == [6] * 4
        assert engine.model("m").statistics().execution_count == 1


async def test_parts_of_a_request_that_is_split(tmp_path):
    config = model(extra="dynamic_batching { }\n" + parameter("split_requests", "true"))
    x = np.repeat(np.arange(50, dtype=np.int64)[:, None], 512, axis=1)
    async with serving(tmp_path, {"m": double}, m=config) as engine:
        np.testing.assert_array_equal((await infer(engine, request(x=x))).array(), 2 * x)


async def test_a_message_that_python_holds_is_not_written_to(tmp_path):
    async with serving(tmp_path, double) as engine:
        for padding in range(8):  # with one of them the tensor lies as models like it
            message = request(x=wide(3), request_id="i" * (8 * padding + 1)).SerializeToString()
            before = bytes(bytearray(message))
            answered = asyncio.Event()
            engine.infer.submit(message, lambda *_, answered=answered: answered.set())
            await asyncio.wait_for(answered.wait(), 30)
            assert message == before


async def test_views_of_what_others_can_see_are_read_only(tmp_path):
    seen = {}

    def look(batch):
        view = batch.input("x")
        seen["writable"] = view.numpy().flags.writeable
        try:
            view.__dlpack__()
        except BufferError as error:
            seen["old capsule"] = str(error)
        seen["capsule"] = not np.from_dlpack(view).flags.writeable
        batch.set_output("y", view.numpy())

    look.writes_inputs = False
    async with serving(tmp_path, look) as engine:
        assert only(await infer(engine, request(x=wide(3)))) == 3
    assert seen == {
        "writable": False,
        "old capsule": "the tensor's memory is shared and read-only, which a capsule before DLPack 1.0 cannot say",
        "capsule": True,
    }


async def test_opposite_gates_within_one_request_are_refused(tmp_path):
    """Two steps write one tensor; where both would run, the first to end would answer for all rows."""
    gates = parameter("gate[1]", "g") + parameter("gate[2]", "!g")

    def judge(batch):
        x = batch.input("x").numpy()
        batch.set_output("g", x[:, :1] > 0)

    judging = model(outputs=()) + 'output { name: "g" data_type: TYPE_BOOL dims: [ 1 ] }\n'
    config = ensemble(
        step("judge", {"x": "x"}, {"g": "g"}),
        step("same", {"x": "x"}, {"y": "y"}),
        step("double", {"x": "x"}, {"y": "y"}),
        extra=gates,
    )
    models = {"judge": judge, "same": same, "double": double}
    async with serving(tmp_path, models, judge=judging, same=model(), double=model(), e=config) as engine:
        assert only(await infer(engine, request("e", x=wide(3)))) == 3
        assert only(await infer(engine, request("e", x=wide(-3)))) == -6
        for _ in range(20):
            answer = await infer(engine, request("e", x=np.concatenate([wide(3), wide(-3)])))
            assert answer.status == 3
            assert "the gate 'g' is true and false within one request" in answer.text
