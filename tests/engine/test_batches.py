"""Guards batches in a real engine: who shares one, what each request gets back, and that one failure stays one."""

import asyncio
import random
import re

import numpy as np
import pytest

from inferd.backends.api import RequestError
from inferd.server.engine.engine import Engine
from inferd.server.errors import Status
from tests.engine.serving import CONFIG, Gate, Pending, echo, infer, infer_all, request, row, serving

OK, INVALID, INTERNAL = Status.OK, Status.INVALID_ARGUMENT, Status.INTERNAL


pytestmark = pytest.mark.usefixtures("native_counters")


async def held(engine: Engine, gate: Gate, *messages) -> list[Pending]:
    """Submit while the instance is busy, so that what may share a batch does."""
    first = Pending(engine, request(x=row(0)))
    await gate.entered()
    pending = [Pending(engine, message) for message in messages]
    gate.go(1000)
    await first.answer()
    return pending


# -- gather and scatter --


async def test_mixed_batch_sizes_are_gathered_and_split(tmp_path):
    gate = Gate(lambda batch: batch.set_output("y", batch.input("x").numpy() * 10))
    async with serving(tmp_path, gate) as engine:
        sent = [np.arange(rows * 2, dtype=np.int64).reshape(rows, 2) + 100 * rows for rows in (1, 3, 2, 1)]
        pending = await held(engine, gate, *(request(x=array) for array in sent))
        for array, each in zip(sent, pending, strict=True):
            answer = await each.answer()
            np.testing.assert_array_equal(answer.array(), array * 10)
        assert gate.batches == [(1, 1), (4, 7)]


async def test_other_shapes_are_not_mixed(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        sent = [row(1, 2), row(3, 4), row(5), row(6), row(7, 8)]
        pending = await held(engine, gate, *(request(x=array) for array in sent))
        for array, each in zip(sent, pending, strict=True):
            np.testing.assert_array_equal((await each.answer()).array(), array)
        assert gate.batches[1:] == [(3, 3), (2, 2)], "those of a shape are gathered"


async def test_requests_without_elements_share_a_batch(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        pending = await held(engine, gate, *(request(x=np.empty((rows, 0), np.int64)) for rows in (1, 2)))
        assert [(await each.answer()).array().shape for each in pending] == [(1, 0), (2, 0)]
        assert gate.batches[1:] == [(2, 3)]


async def test_optional_inputs(tmp_path):
    """Requests with and without it share no batch; a batch sees None or all of it."""
    config = CONFIG + 'input { name: "bias" data_type: TYPE_INT64 dims: [ 1 ] optional: true }'

    def add(batch):
        bias = batch.input("bias")
        batch.set_output("y", batch.input("x").numpy() + (0 if bias is None else bias.numpy()))

    gate = Gate(add)
    async with serving(tmp_path, gate, m=config) as engine:
        plain, biased = request(x=row(1)), request(x=row(1), bias=row(5))
        pending = await held(engine, gate, plain, plain, biased, biased, plain)
        assert [(await each.answer()).array().item() for each in pending] == [1, 1, 6, 6, 1]
        assert gate.batches[1:] == [(3, 3), (2, 2)], "those of a shape are gathered"


BYTES_CONFIG = CONFIG.replace("TYPE_INT64", "TYPE_STRING")


async def test_bytes_are_gathered_and_split(tmp_path):
    def upper(batch):
        view = batch.input("x")
        array = view.numpy()
        assert (array.shape, view.strings()) == (view.shape, list(array.flat))
        batch.set_bytes_output("y", [element.upper() for element in view.strings()], view.shape)

    gate = Gate(lambda batch: upper(batch))
    sent = [
        np.array([[b"a", b""]], dtype=object),
        np.array([[b"x" * 1000, b"b"], [b"", b"\0\xff"]], dtype=object),
        np.array([["ä".encode(), b"c"]], dtype=object),
    ]
    async with serving(tmp_path, gate, m=BYTES_CONFIG) as engine:
        first = Pending(engine, request(x=sent[0]))
        await gate.entered()
        pending = [Pending(engine, request(x=array)) for array in sent]
        gate.go(10)
        await first.answer()
        for array, each in zip(sent, pending, strict=True):
            expected = np.array([element.upper() for element in array.flat], dtype=object).reshape(array.shape)
            np.testing.assert_array_equal((await each.answer()).array(), expected)
        assert gate.batches[1:] == [(3, 4)]


async def test_model_without_batch_dimension(tmp_path):
    config = CONFIG.replace("max_batch_size: 8", "max_batch_size: 0").replace("dynamic_batching { }", "")
    gate = Gate()
    async with serving(tmp_path, gate, m=config) as engine:
        gate.go(10)
        answers = await infer_all(engine, *(request(x=np.arange(n)) for n in range(4)))
        assert [list(answer.array()) for answer in answers] == [[], [0], [0, 1], [0, 1, 2]]
        assert gate.batches == [(1, 1)] * 4


async def test_only_wanted_outputs_are_sent(tmp_path):
    config = CONFIG + 'output { name: "z" data_type: TYPE_INT64 dims: [ 1 ] }'
    wanted = []

    def both(batch):
        wanted.append((batch.wants("y"), batch.wants("z")))
        batch.set_output("y", batch.input("x").numpy())
        batch.set_output("z", batch.input("x").numpy() + 1)

    gate = Gate(both)
    async with serving(tmp_path, gate, m=config) as engine:
        gate.go(10)
        for outputs in (("y",), ("z",), ("z", "y"), ()):
            answer = await infer(engine, request(x=row(1), outputs=outputs))
            assert [output.name for output in answer.response.outputs] == sorted(outputs or ("y", "z"))
        assert wanted == [(True, False), (False, True), (True, True), (True, True)]


async def test_larger_then_smaller_batches_on_one_instance(tmp_path):
    """What an instance keeps between batches must not leak from one into the next."""
    gate = Gate()
    rng = random.Random(3)
    async with serving(tmp_path, gate) as engine:
        gate.go(1000)
        for rows, width in [(8, 5000), (1, 1), (4, 300), (1, 5000), (8, 1), (2, 7)] * 3:
            array = np.array([[rng.randrange(1 << 60) for _ in range(width)] for _ in range(rows)])
            answer = await infer(engine, request(x=array))
            np.testing.assert_array_equal(answer.array(), array)


async def test_batch_of_more_requests_than_the_first_reservation(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate, m=CONFIG.replace("max_batch_size: 8", "max_batch_size: 500")) as engine:
        pending = await held(engine, gate, *(request(x=row(n)) for n in range(400)))
        assert [(await each.answer()).array().item() for each in pending] == list(range(400))
        assert gate.batches[1:] == [(400, 400)]


# -- failures --


async def test_bad_requests_among_good_ones(tmp_path):
    gate = Gate()
    async with serving(tmp_path, gate) as engine:
        wrong = [request(x=np.zeros((1, 1), np.float32)), request(x=np.zeros((9, 1), np.int64)), request(nope=row(1))]
        messages = [request(x=row(1)), wrong[0], request(x=row(2)), wrong[1], wrong[2], request(x=row(3))]
        pending = await held(engine, gate, *messages)
        answers = [await each.answer() for each in pending]
        assert [answer.status for answer in answers] == [OK, INVALID, OK, INVALID, INVALID, OK]
        assert [answers[i].array().item() for i in (0, 2, 5)] == [1, 2, 3]
        assert gate.batches[1:] == [(3, 3)]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("not even that")


def _raise(error):
    raise error


def _output(make):
    return lambda batch: batch.set_output("y", make(batch))


def _caught(batch):
    """A backend that takes a refusal for a warning."""
    try:
        batch.set_output("y", np.zeros((batch.rows + 1, 1), np.int64))
    except ValueError:
        return


FAILURES = {
    "exception": (lambda batch: _raise(RuntimeError("out of luck: 100%s")), "out of luck: 100%s"),
    "no text": (lambda batch: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
    "unprintable": (lambda batch: _raise(Unprintable()), "Unprintable"),
    "surrogate": (lambda batch: _raise(RuntimeError("bad \ud800")), "bad "),
    "exit": (lambda batch: _raise(SystemExit(3)), "3"),
    "too many rows": (_output(lambda batch: np.zeros((batch.rows + 1, 1), np.int64)), "batch dimension"),
    "no batch dimension": (_output(lambda batch: np.int64(1)), "batch dimension"),
    "refusal caught": (_caught, "batch dimension"),
    "wrong datatype": (_output(lambda batch: np.zeros((batch.rows, 1), np.float32)), "must be INT64, got FP32"),
    "not contiguous": (_output(lambda batch: np.zeros((batch.rows, 4), np.int64)[:, ::2]), "contiguous"),
    "no array": (_output(lambda batch: [1]), "must be an array"),
    "missing": (lambda batch: None, "did not produce output 'y'"),
    "unknown output": (lambda batch: batch.set_output("q", np.zeros(1)), "no output 'q'"),
    "unknown input": (lambda batch: batch.input("q"), "no input 'q'"),
    "bytes": (lambda batch: batch.set_bytes_output("y", [b"a"] * batch.rows, (batch.rows, 1)), "not BYTES"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failing_batch_fails_alone(tmp_path, caplog, failure):
    """INTERNAL with a text for every request of the batch, and the next batch works.

    What the backend has raised may be about one of them: it is in the log, under a number that all are told.
    """
    execute, text = FAILURES[failure]
    failing = [False, True, False]
    gate = Gate(lambda batch: (execute if failing.pop(0) else echo)(batch))
    async with serving(tmp_path, gate) as engine:
        pending = await held(engine, gate, request(x=row(1)), request(x=row(2)), request(x=row(3)))
        for each in pending:
            answer = await each.answer()
            assert answer.status == INTERNAL
            if mark := re.search("a batch of 3 requests failed; the server's log says why, as (error .*)", answer.text):
                assert re.search(f"{mark[1]}: .*{re.escape(text)}", caplog.text)
            else:
                assert text in answer.text
        assert gate.batches[1:] == [(3, 3)]
        answer = await infer(engine, request(x=row(9)))
        assert answer.array().item() == 9


BYTES_FAILURES = {
    "too few": (lambda batch: batch.set_bytes_output("y", [], (batch.rows, 1)), "does not hold"),
    "too many": (
        lambda batch: batch.set_bytes_output("y", [b"a"] * (batch.rows + 1), (batch.rows, 1)),
        "does not hold",
    ),
    "negative": (lambda batch: batch.set_bytes_output("y", [b"a"], (batch.rows, -1)), "impossible shape"),
    "overflow": (lambda batch: batch.set_bytes_output("y", [b"a"], (batch.rows, 1 << 62, 8)), "impossible shape"),
    "rank": (lambda batch: batch.set_bytes_output("y", [b"a"], (batch.rows,) + (1,) * 16), "17 dimensions"),
    "array": (lambda batch: batch.set_output("y", np.zeros((batch.rows, 1))), "set_bytes_output"),
    "numbers": (lambda batch: batch.set_bytes_output("y", [5] * batch.rows, (batch.rows, 1)), "bytes or str"),
    "arrays": (lambda batch: batch.set_bytes_output("y", np.zeros((batch.rows, 1)), (batch.rows, 1)), "bytes or str"),
}


@pytest.mark.parametrize("failure", BYTES_FAILURES)
async def test_wrong_bytes_outputs(tmp_path, failure):
    execute, text = BYTES_FAILURES[failure]
    async with serving(tmp_path, execute, m=BYTES_CONFIG) as engine:
        answer = await infer(engine, request(x=np.array([[b"a"]], dtype=object)))
        assert answer.status == INTERNAL
        assert text in answer.text


async def test_an_output_set_twice_counts_as_set_last(tmp_path):
    def twice(batch):
        echo(batch)
        batch.set_output("y", batch.input("x").numpy() + 1)

    async with serving(tmp_path, twice) as engine:
        assert (await infer(engine, request(x=row(1)))).array().item() == 2


async def test_a_batch_is_over_when_it_is_answered(tmp_path):
    kept = []

    def keep(batch):
        kept.append(batch)
        echo(batch)

    async with serving(tmp_path, keep) as engine:
        await infer(engine, request(x=row(1)))
        [batch] = kept
        uses = [
            lambda: batch.rows,
            lambda: batch.request_count,
            lambda: batch.input("x"),
            lambda: batch.wants("y"),
            lambda: batch.set_output("y", row(1)),
        ]
        for use in uses:
            with pytest.raises(ValueError, match="answered"):
                use()
        kept.clear()


# -- classification --


async def test_classification_of_a_batch(tmp_path):
    """Each request gets its own classes, one may ask for none; the tensors need not be aligned."""
    config = """
        backend: "identity" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 20000 }
        input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
        output { name: "x" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }
    """
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "labels.txt").write_text("a\nb\nc\nd\n")
    scores = np.array([[0.1, 0.7, 0.2, 0.0], [9, 8, 7, 6]], dtype=np.float32)
    async with serving(tmp_path, m=config) as engine:
        messages = []
        for size, classes in enumerate((0, 1, 2, 9)):
            message = request(request_id="i" * size, x=scores)
            if classes:
                message.outputs.add(name="x").parameters["classification"].int64_param = classes
            messages.append(message)
        plain, best, two, all_ = await infer_all(engine, *messages)
        np.testing.assert_array_equal(plain.array("x"), scores)
        assert best.array("x").tolist() == [[b"0.700000:1:b"], [b"9.000000:0:a"]]
        assert two.array("x").tolist() == [[b"0.700000:1:b", b"0.200000:2:c"], [b"9.000000:0:a", b"8.000000:1:b"]]
        assert all_.array("x").shape == (2, 4)


async def test_classification_that_cannot_be_fails_alone(tmp_path):
    gate = Gate(lambda batch: batch.set_bytes_output("y", [b"s"] * batch.rows, (batch.rows, 1)))
    config = BYTES_CONFIG.replace('"x" data_type: TYPE_STRING', '"x" data_type: TYPE_INT64')
    async with serving(tmp_path, gate, m=config) as engine:
        wrong = request(x=row(2))
        wrong.outputs.add(name="y").parameters["classification"].int64_param = 1
        good, bad = await held(engine, gate, request(x=row(1)), wrong)
        assert (await good.answer()).status == OK
        answer = await bad.answer()
        assert (answer.status, "unsupported type 'BYTES'" in answer.text) == (INVALID, True)
        assert gate.batches[1:] == [(2, 2)]


async def test_nothing_is_delivered_to_a_loop_that_does_not_run(tmp_path):
    """Answers wait on the bridge, and one wake-up brings all of them."""
    rounds = []
    async with serving(tmp_path) as engine:
        pending = []
        engine.after_delivery(lambda: rounds.append(sum(bool(each.answers) for each in pending)))
        pending += [Pending(engine, request(x=row(n))) for n in range(50)]
        executed = engine.model("m").lane
        while executed.statistics()["success"][0] < 50:  # the loop is kept busy until all are ready
            pass
        assert not any(each.answers for each in pending)
        for each in pending:
            await each.answer()
        assert rounds in ([50], [50, 50])
        await asyncio.sleep(0)


# -- one request whose content fails the execution --


def isolating(execute, **attributes):
    gate = Gate(execute)
    gate.isolates_failures, gate.writes_inputs = True, False
    vars(gate).update(attributes)
    return gate


def poisoned(error, first=False):
    """y is x; fails, perhaps after it has set y, if a 13 is in x."""

    def execute(batch):
        x = batch.input("x").numpy()
        if first:
            batch.set_output("y", x.copy() if x.shape[0] > 1 else -x)
        if (x == 13).any():
            raise error("13")
        batch.set_output("y", x)

    return execute


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("error", "status"), [(ValueError, INTERNAL), (RequestError, INVALID)])
async def test_a_request_that_fails_its_batch_fails_alone(tmp_path, first, error, status):
    """Guards `isolates_failures`: the neighbours have their answers, the offender its own error."""
    gate = isolating(poisoned(error, first))
    async with serving(tmp_path, gate) as engine:
        numbers = [1, 13, 2, 3]
        answers = [await each.answer() for each in await held(engine, gate, *(request(x=row(n)) for n in numbers))]
        assert [answer.status for answer in answers] == [OK, status, OK, OK]
        assert "13" in answers[1].text
        assert [answer.array().item() for answer in answers if answer.status == OK] == [1, 2, 3]
        assert [requests for requests, _ in gate.batches] == [1, 4, 1, 1, 1, 1]
        found = engine.model("m").statistics().inference_stats
        assert (found.success.count, found.fail.count) == (4, 1)


async def test_a_batch_of_one_request_of_a_failed_batch_is_over_when_its_execution_is(tmp_path):
    """Guards a backend that keeps its batches: it gets an error, and does not write into later ones."""
    kept = []
    execute = poisoned(ValueError)

    def keep(batch):
        kept.append(batch)
        execute(batch)

    gate = isolating(keep)
    async with serving(tmp_path, gate) as engine:
        answers = [await each.answer() for each in await held(engine, gate, *(request(x=row(n)) for n in (13, 2)))]
        assert [answer.status for answer in answers] == [INTERNAL, OK]
        assert len(kept) == 4  # the first request, the two that fail together, and each of these alone
        for batch in kept:
            with pytest.raises(ValueError, match="this batch has been answered"):
                batch.rows  # noqa: B018


async def test_requests_of_a_failed_batch_have_what_their_clients_sent(tmp_path):
    """Guards `isolates_failures` of a backend that writes to its inputs, which the batch has in a copy."""

    def negate(batch):
        x = batch.input("x").numpy()
        bad = (x == 13).any()
        x *= -1
        if bad:
            raise ValueError("13")
        batch.set_output("y", x.copy())

    gate = isolating(negate, writes_inputs=True)
    async with serving(tmp_path, gate) as engine:
        answers = [await each.answer() for each in await held(engine, gate, *(request(x=row(n)) for n in (1, 13, 2)))]
        assert [answer.status for answer in answers] == [OK, INTERNAL, OK]
        assert [answer.array().item() for answer in answers if answer.status == OK] == [-1, -2]


async def test_a_batch_is_not_executed_once_more_where_that_is_not_declared_safe(tmp_path):
    gate = isolating(poisoned(ValueError), isolates_failures=False)
    async with serving(tmp_path, gate) as engine:
        answers = [await each.answer() for each in await held(engine, gate, *(request(x=row(n)) for n in (1, 13)))]
        assert [answer.status for answer in answers] == [INTERNAL, INTERNAL]
        assert [requests for requests, _ in gate.batches] == [1, 2]
