"""Guards ensembles with decoupled steps: each response goes through the steps behind it, in order, and the ensemble
ends when all of them have.
"""

import asyncio

import numpy as np
import pytest

from inferd._native.service.ticket import CallOrigin
from inferd.server.errors import Status
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.serving import Answer, Gate, request, row, serving
from tests.engine.test_ensembles import add, ensemble, model, parameter, plus, step, sum_of_present, tensors

SPLIT = (
    'backend: "identity"\nmax_batch_size: 8\n'
    + tensors("input", "x")
    + tensors("output", "y")
    + "instance_group { kind: KIND_CPU count: 1 }\nmodel_transaction_policy { decoupled: true }\n"
)


pytestmark = pytest.mark.usefixtures("native_counters")


class Stream:
    """A request with all its responses."""

    def __init__(self, engine, message):
        self.answers = []
        self._done = asyncio.Event()
        self._ticket = None
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        self._ticket = engine.infer.submit(message.SerializeToString(), self._deliver, CallOrigin(stream=True))

    def _deliver(self, status, text, response):
        inner = pb.ModelStreamInferResponse.FromString(response).infer_response
        self._ticket.taken()
        self.answers.append(Answer(status, text, inner))
        if self._ticket.done:
            self._done.set()

    def cancel(self):
        self._ticket.cancel()

    async def all(self):
        await asyncio.wait_for(self._done.wait(), 30)
        finals = [answer.response.parameters["triton_final_response"].bool_param for answer in self.answers]
        assert finals == [False] * (len(finals) - 1) + [True] or self.answers[-1].status != Status.OK
        return self.answers


async def values(engine, message, name="y"):
    """The output's values of each response that has one."""
    answers = await Stream(engine, message).all()
    assert [answer.status for answer in answers] == [Status.OK] * len(answers)
    return [answer.array(name).tolist() for answer in answers if len(answer.response.outputs)]


def column(*numbers):
    return np.array([[number] for number in numbers], np.int64)


async def test_order_is_kept_over_instances(tmp_path):
    instances = model(max_batch_size=1, extra="").replace("count: 1", "count: 4")
    config = ensemble(step("split", {"x": "x"}, {"y": "t"}), step("one", {"x": "t"}, {"y": "y"}), max_batch_size=1)
    split = SPLIT.replace("max_batch_size: 8", "max_batch_size: 0").replace("dims: [ -1 ]", "dims: [ -1, 1 ]")
    config = config.replace("max_batch_size: 1", "max_batch_size: 0").replace("dims: [ -1 ]", "dims: [ -1, 1 ]")
    async with serving(tmp_path, {"one": plus(1)}, split=split, one=instances, e=config) as engine:
        numbers = list(range(200))
        found = await values(engine, request("e", x=column(*numbers)))
        assert found == [[[n + 1]] for n in numbers]
        assert await values(engine, request("e", x=np.zeros((0, 1), np.int64))) == []


async def test_branches_of_one_response_meet_again(tmp_path):
    config = ensemble(
        step("split", {"x": "x"}, {"y": "t"}),
        step("one", {"x": "t"}, {"y": "l"}),
        step("ten", {"x": "t"}, {"y": "r"}),
        step("join", {"a": "l", "b": "r"}, {"y": "y"}),
    )
    models = {"one": plus(1), "ten": plus(10), "join": add}
    configs = {"split": SPLIT, "one": model(), "ten": model(), "join": model(inputs=("a", "b")), "e": config}
    async with serving(tmp_path, models, **configs) as engine:
        assert await values(engine, request("e", x=column(1, 2, 3))) == [[[13]], [[15]], [[17]]]


async def test_a_tensor_from_outside_is_used_for_each_response(tmp_path):
    config = ensemble(
        step("one", {"x": "c"}, {"y": "d"}),
        step("split", {"x": "x"}, {"y": "t"}),
        step("join", {"a": "t", "b": "d"}, {"y": "y"}),
        inputs=("x", "c"),
        outputs=("y", "d"),
        max_batch_size=0,
    ).replace("dims: [ -1 ]", "dims: [ -1, 1 ]")

    def flat(text):
        return text.replace("max_batch_size: 8", "max_batch_size: 0").replace("dims: [ -1 ]", "dims: [ -1, 1 ]")

    slow = Gate(plus(1))
    models = {"one": slow, "join": add}
    configs = {"split": flat(SPLIT), "one": flat(model(extra="")), "join": flat(model(inputs=("a", "b"), extra=""))}
    async with serving(tmp_path, models, **configs, e=config) as engine:
        stream = Stream(engine, request("e", x=column(1, 2, 3), c=column(100)))
        await slow.entered()
        slow.go()
        answers = await stream.all()
        found = [(a.array("y").item(), a.array("d").item()) for a in answers if len(a.response.outputs)]
        assert found == [(102, 101), (103, 101), (104, 101)]


async def test_an_output_that_a_response_leaves_out_is_an_absent_input_of_the_next(tmp_path):
    """Guards that the steps behind do not wait for it."""
    optional = tensors("input", "o", extra="optional: true")
    config = ensemble(
        step("split", {"x": "x", "o": "o"}, {"y": "t", "z": "u"}),
        step("sum", {"a": "t", "b": "u"}, {"y": "y"}),
    )
    configs = {"split": SPLIT + optional + tensors("output", "z"), "e": config + optional}
    joins = model(inputs=("a", "b"), optional=("b",))
    async with serving(tmp_path, {"sum": sum_of_present}, sum=joins, **configs) as engine:
        assert await values(engine, request("e", x=column(1, 2), o=column(5, 6))) == [[[6]], [[8]]]
        assert await values(engine, request("e", x=column(1, 2))) == [[[1]], [[2]]]


async def test_a_decoupled_step_behind_another(tmp_path):
    config = ensemble(step("split", {"x": "x"}, {"y": "t"}), step("again", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {}, split=SPLIT, again=SPLIT, e=config) as engine:
        assert sorted(await values(engine, request("e", x=column(1, 2, 3)))) == [[[1]], [[2]], [[3]]]


async def test_an_output_of_the_request_as_a_whole_alone_is_one_response(tmp_path):
    config = ensemble(step("split", {"x": "x"}, {"y": "y"}), step("one", {"x": "x"}, {"y": "z"}), outputs=("y", "z"))
    async with serving(tmp_path, {"one": plus(1)}, split=SPLIT, one=model(), e=config) as engine:
        answers = await Stream(engine, request("e", outputs=("z",), x=column(1, 2))).all()
        assert [answer.array("z").tolist() for answer in answers] == [[[2], [3]]]
        assert engine.model("split").statistics().execution_count == 0


async def test_a_gate_for_each_response(tmp_path):
    def is_even(batch):
        batch.set_output("even", batch.input("x").numpy() % 2 == 0)

    even = model(extra="").replace(tensors("output", "y"), tensors("output", "even", datatype="BOOL", dims="[ 1 ]"))
    config = ensemble(
        step("split", {"x": "x"}, {"y": "t"}),
        step("even", {"x": "t"}, {"even": "even"}),
        step("ten", {"x": "t"}, {"y": "y"}),
        outputs=("y", "t"),
        extra=parameter("gate[ten]", "even"),
    )
    models = {"even": is_even, "ten": plus(10)}
    async with serving(tmp_path, models, split=SPLIT, even=even, ten=model(), e=config) as engine:
        answers = await Stream(engine, request("e", x=column(1, 2, 4))).all()
        found = [
            {o.name: answer.array(o.name).item() for o in answer.response.outputs}
            for answer in answers
            if len(answer.response.outputs)
        ]
        assert found == [{"t": 1}, {"t": 2, "y": 12}, {"t": 4, "y": 14}]


async def test_at_most_max_inflight_requests_behind_a_decoupled_step(tmp_path):
    gate = Gate(plus(1))
    config = ensemble(
        step("split", {"x": "x"}, {"y": "t"}),
        step("one", {"x": "t"}, {"y": "y"}),
        scheduling="max_inflight_requests: 2",
    )
    async with serving(tmp_path, {"one": gate}, split=SPLIT, one=model(), e=config) as engine:
        stream = Stream(engine, request("e", x=column(*range(8))))
        gate.go(20)
        answers = await stream.all()
        assert [a.array().item() for a in answers if len(a.response.outputs)] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert max(rows for _, rows in gate.batches) <= 2


async def test_cancelling_a_stream_in_the_middle(tmp_path):
    gate = Gate(plus(1))
    config = ensemble(step("split", {"x": "x"}, {"y": "t"}), step("one", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {"one": gate}, split=SPLIT, one=model(max_batch_size=8), e=config) as engine:
        stream = Stream(engine, request("e", x=column(*range(8))))
        await gate.entered()
        stream.cancel()
        gate.go(20)
        assert await values(engine, request("e", x=row(5))) == [[[6]]]
        assert stream.answers == []


async def test_streams_side_by_side(tmp_path):
    config = ensemble(step("split", {"x": "x"}, {"y": "t"}), step("one", {"x": "t"}, {"y": "y"}))
    outer = ensemble(step("e", {"x": "x"}, {"y": "t"}), step("one", {"x": "t"}, {"y": "y"}))
    async with serving(tmp_path, {"one": plus(1)}, split=SPLIT, one=model(), e=config, outer=outer) as engine:
        assert engine.model("outer").config.model_transaction_policy.decoupled
        streams = [Stream(engine, request("outer", x=column(n, n + 100, n + 200))) for n in range(30)]
        for n, stream in enumerate(streams):
            found = [a.array().item() for a in await stream.all() if len(a.response.outputs)]
            assert found == [n + 2, n + 102, n + 202]


async def test_cancelling_streams_at_random_leaves_nothing(tmp_path):
    def sometimes(batch):
        array = batch.input("x").numpy()
        if (array == 77).any():
            raise RuntimeError("77")
        batch.set_output("y", array + 1)

    inner = ensemble(
        step("split", {"x": "x"}, {"y": "t"}),
        step("some", {"x": "t"}, {"y": "y"}),
        scheduling="max_inflight_requests: 3",
    )
    outer = ensemble(step("e", {"x": "x"}, {"y": "t"}), step("some", {"x": "t"}, {"y": "y"}))
    some = model(max_batch_size=2, extra="").replace("count: 1", "count: 2")
    outer, inner = (text.replace("max_batch_size: 8", "max_batch_size: 2") for text in (outer, inner))
    split = SPLIT.replace("max_batch_size: 8", "max_batch_size: 2")
    async with serving(tmp_path, {"some": sometimes}, split=split, some=some, e=inner, outer=outer) as engine:
        generator = np.random.default_rng(11)
        for _ in range(30):
            streams = [Stream(engine, request("outer", x=column(n, 77 if n == 5 else 200 + n))) for n in range(12)]
            for _ in range(int(generator.integers(6))):
                await asyncio.sleep(0)
            gone = generator.random(12) < 0.3
            for stream, leaves in zip(streams, gone, strict=True):
                if leaves:
                    stream.cancel()
            for n, stream in enumerate(streams):
                if gone[n]:
                    continue
                answers = await stream.all()
                if n == 5:
                    assert answers[-1].text in ("in ensemble 'outer', in ensemble 'e', 77", "in ensemble 'outer', 77")
                else:
                    found = [a.array().item() for a in answers if len(a.response.outputs)]
                    assert found == [n + 2, n + 202]


async def test_responses_that_nobody_takes_are_not_made(tmp_path):
    """A request of a few bytes asks for 2^40 of them."""
    config = SPLIT.replace("max_batch_size: 8", "max_batch_size: 0").replace("dims: [ -1 ]", "dims: [ -1, -1 ]")
    async with serving(tmp_path, m=config) as engine:
        message = request("m", x=np.empty((1, 0), np.int64))
        message.inputs[0].shape[0] = 1 << 40
        got = asyncio.Queue()
        ticket = engine.infer.submit(
            message.SerializeToString(), lambda *answer: got.put_nowait(answer), CallOrigin(stream=True)
        )
        for _ in range(64):
            assert (await asyncio.wait_for(got.get(), 30))[0] == Status.OK
        before = engine._deliveries.bridge.admitted_count
        for _ in range(3):  # each that is taken makes room for one
            ticket.taken()
            assert (await asyncio.wait_for(got.get(), 30))[0] == Status.OK
        assert got.empty()
        assert before == 1
        ticket.cancel()
        assert await values(engine, request("m", x=column(1, 2, 3))) == [[[1]], [[2]], [[3]]]
