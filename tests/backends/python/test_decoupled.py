"""Decoupled models: any number of responses, through a real stream, with back-pressure and cancellation."""

import asyncio
import os
import resource
from dataclasses import dataclass, field

import numpy as np
import pytest

from inferd.backends.python.arenas import arena_of
from inferd.server.engine.engine import Engine
from inferd.server.rpc.exchange import EngineError, Exchange
from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.python.served import CONFIG, add_model, ask, serving
from tests.engine.serving import request, row
from tests.engine.test_ensembles import ensemble, step
from tests.waiting import until

DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"

# Counts down from its input in a thread; -1: an error in between; -2: dies after two; -5: raises after five.
COUNTDOWN = """
import os, pathlib, threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def initialize(self, args):
        self.told = pathlib.Path(args["model_repository"]) / "told"

    def execute(self, requests):
        for request in requests:
            first = int(request.inputs()[0].as_numpy().flat[0])
            sender = request.get_response_sender()
            if first == -5:
                self.answer(first, sender)
            threading.Thread(target=self.answer, args=(first, sender), daemon=True).start()

    def answer(self, first, sender):
        if first == -3:
            sender.send(self.number(7), FINAL)
            return
        if first == -4:
            sent = 0
            while not sender.is_cancelled():
                sender.send(self.number(sent))
                sent += 1
                self.told.write_text(str(sent))
            self.told.write_text("cancelled")
            sender.send(flags=FINAL)
            return
        for n in range(abs(first), 0, -1):
            sender.send(self.number(n))
        if first == -1:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("in between")))
        if first == -2:
            os._exit(1)
        if first == -5:
            raise ValueError("after five")
        sender.send(flags=FINAL)

    def number(self, n):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[n]], np.int64))])
"""


@dataclass
class FakeCall:
    """What an exchange needs of a call."""

    caller: int = 0
    user: int = -1
    identity: int = 0
    client: int = 0
    forwarded: bytes = b""
    connection: int = 0
    peer: str = ""
    metadata: dict = field(default_factory=dict)

    def time_remaining(self):
        return None

    def hold(self, size):
        pass


class Client:
    """One stream over an engine."""

    def __init__(self, engine: Engine, window: int = 128) -> None:
        self._requests: asyncio.Queue = asyncio.Queue()
        self._exchange = Exchange(engine.infer, FakeCall(), window, errors_inside=True)
        self._reader = asyncio.create_task(self._exchange.read(self._messages()))
        self._responses = self._exchange.responses()

    async def _messages(self):
        while (message := await self._requests.get()) is not None:
            yield message.SerializeToString()

    def send(self, message: pb.ModelInferRequest) -> None:
        self._requests.put_nowait(message)

    def end(self) -> None:
        self._requests.put_nowait(None)

    async def next(self) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse.FromString(await asyncio.wait_for(anext(self._responses), 30))

    async def rest(self) -> list[pb.ModelStreamInferResponse]:
        self.end()
        return [pb.ModelStreamInferResponse.FromString(data) async for data in self._responses]

    async def close(self) -> None:
        self._reader.cancel()
        self._exchange.abandon()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._responses.aclose()


def number(response: pb.ModelStreamInferResponse) -> int:
    return int.from_bytes(response.infer_response.raw_output_contents[0][:8], "little")


def is_final(response: pb.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


def told_by(response: pb.ModelStreamInferResponse) -> str | int:
    if response.error_message:
        return response.error_message
    return number(response) if response.infer_response.outputs else "nothing"


async def test_what_a_client_gets(tmp_path):
    """The responses, the empty final one if it asks for that, and errors: one in between, which ends nothing."""
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    async with serving(tmp_path) as engine:

        async def told(first, **asked_for):
            client = Client(engine)
            message = request(x=row(first), request_id="a")
            for name, value in asked_for.items():
                message.parameters[name].bool_param = value
            client.send(message)
            responses = await client.rest()
            await client.close()
            assert {response.infer_response.id for response in responses} == {"a"}
            assert {response.infer_response.model_name for response in responses} == {"m"}
            return [(told_by(response), is_final(response)) for response in responses]

        assert await told(3) == [(3, False), (2, False), (1, False)]
        statistics = engine.model("m").statistics()
        assert (statistics.inference_count, statistics.inference_stats.success.count) == (1, 1)
        assert await told(2, triton_enable_empty_final_response=True) == [(2, False), (1, False), ("nothing", True)]
        assert await told(-3) == [(7, True)]
        assert await told(-1) == [(1, False), ("in between", False)]
        *sent, (failed, final) = await told(-5)
        assert sent == [(5, False), (4, False), (3, False), (2, False), (1, False)]
        assert ("ValueError: after five" in failed, final) == (True, True)


# Answers once in each round, and asks for another.
ROUNDS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    left = None

    def execute(self, requests):
        [request] = requests
        if self.left is None:
            self.left = int(request.inputs()[0].as_numpy().flat[0])
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[self.left]], np.int64))])
        self.left -= 1
        if self.left:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        request.get_response_sender().send(answer, 0 if self.left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_every_response_of_a_request_that_is_rescheduled_arrives(tmp_path):
    sequences = "sequence_batching { oldest { } iterative_sequence: true }"
    add_model(tmp_path, "m", ROUNDS, DECOUPLED + sequences)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(300)))
        assert [number(response) for response in await client.rest()] == list(range(300, 0, -1))
        await client.close()


async def test_a_dead_worker_ends_what_is_open_with_an_error(tmp_path):
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(-2)))
        *numbers, last = await client.rest()
        assert [number(response) for response in numbers] == [2, 1]
        assert "exited with status 1" in last.error_message
        assert is_final(last)
        await client.close()


async def test_a_client_that_does_not_read_stops_the_model(tmp_path):
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(100_000)))
        assert number(await client.next()) == 100_000
        # The model's responses are counted where the stream keeps them: never more than the window of a sender.
        [open_request] = client._exchange._decoupled
        for expected in range(99_999, 99_000, -1):
            assert len(open_request.responses) <= 64
            assert number(await client.next()) == expected
        await client.close()


# Threads share a sender. Files say that all of them wait for the client, and that `execute` has ended.
SHARED = """
import pathlib, threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
WINDOW = 64

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def execute(self, requests):
        self.begun, self.lock = 0, threading.Lock()
        self.full = threading.Event()
        threads, each, early = (int(number) for number in requests[0].inputs()[0].as_numpy().flat[:3])
        sender = requests[0].get_response_sender()
        others = [threading.Thread(target=self.send, args=(sender, each, WINDOW + threads)) for _ in range(threads)]
        for other in others:
            other.start()
        self.full.wait()
        (self.folder / "full").touch()
        if early:
            sender.send(flags=FINAL)
        for other in others:
            other.join()
        if not early:
            sender.send(flags=FINAL)
        (self.folder / "ended").touch()

    def send(self, sender, count, full):
        for number in range(count):
            with self.lock:
                self.begun += 1
                if self.begun == full:
                    self.full.set()
            try:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[number]], np.int64))]))
            except pb_utils.TritonModelException:
                return
"""


async def test_many_threads_may_wait_for_a_slow_client(tmp_path):
    """More than there is credit for at once: it reaches each of them in the end."""
    threads, each = 20, 70
    version = add_model(tmp_path, "m", SHARED, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(threads, each, 0)))
        await until((version.parent / "full").exists)  # the window, while all threads want to send
        numbers = [number(await client.next()) for _ in range(threads * each)]
        assert sorted(numbers) == sorted([*range(each)] * threads)
        await client.close()


async def test_the_end_of_the_responses_lets_threads_go_that_wait_for_a_slow_client(tmp_path):
    """What they want to send comes too late, and is ignored."""
    version = add_model(tmp_path, "m", SHARED, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(3, 1000, 1)))
        await until((version.parent / "ended").exists, "threads still wait")
        numbers = [number(await client.next()) for _ in range(64)]
        assert len(numbers) == 64
        await client.close()


async def test_cancellation_reaches_the_model(tmp_path):
    version = add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(-4)))
        await client.next()
        await client.close()
    assert (version.parent / "told").read_text() == "cancelled"  # closing the engine waits for what is open


async def test_requests_of_decoupled_models_do_not_wait_for_each_other(tmp_path):
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(10_000), request_id="long"))
        client.send(request(x=row(1), request_id="short"))
        # Unread, the long one is held back by its window.
        while engine.model("m").statistics().inference_count == 0:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        ids = [(await client.next()).infer_response.id for _ in range(200)]
        assert "short" in ids
        await client.close()


async def test_model_infer_needs_a_parameter(tmp_path):
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    allowed = 'parameters { key: "decoupled_model_infer" value { string_value: "true" } }'
    add_model(tmp_path, "one", COUNTDOWN, DECOUPLED + allowed)
    async with serving(tmp_path) as engine:
        answer = await ask(engine, 1)
        assert answer.status == 12
        assert "doesn't support models with decoupled transaction policy" in answer.text
        assert (await ask(engine, 1, model="one")).array().tolist() == [[1]]
        assert (await ask(engine, -3, model="one")).array().tolist() == [[7]]
        answer = await ask(engine, 2, model="one")
        assert answer.status == 13
        assert "more than one response" in answer.text


SENDER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0]
            response = pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])
            if int(x.as_numpy().flat[0]) % 2:
                request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                answers.append(None)
            else:
                answers.append(response)
        return answers
"""


async def test_a_sender_in_a_model_that_is_not_decoupled(tmp_path):
    async with serving(tmp_path, m=SENDER) as engine:
        for value in range(4):
            assert (await ask(engine, value)).array().tolist() == [[value]]


async def test_errors_may_end_the_stream(tmp_path):
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    async with serving(tmp_path) as engine:
        exchange = Exchange(engine.infer, FakeCall(), 8, errors_inside=False)

        async def messages():
            yield request(x=row(-1)).SerializeToString()

        reader = asyncio.create_task(exchange.read(messages()))
        with pytest.raises(EngineError, match="in between"):
            async for _ in exchange.responses():
                pass
        exchange.abandon()
        await reader


async def test_more_responses_than_the_request_takes_hold_nobody_up(tmp_path):
    """One of many: the request fails, the sender goes on, and so does the instance."""
    code = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for _ in range(int(request.inputs()[0].as_numpy().flat[0])):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[7]], np.int64))]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    parameter = 'parameters { key: "decoupled_model_infer" value { string_value: "true" } }'
    add_model(tmp_path, "m", code, DECOUPLED + parameter)
    async with serving(tmp_path) as engine:
        for count in (65, 200):
            answer = await ask(engine, count)
            assert (answer.status, "more than one response" in answer.text) == (13, True)
        assert (await ask(engine, 1)).array().tolist() == [[7]]


async def test_a_response_of_many_large_outputs(tmp_path):
    count = 100
    outputs = "".join(f'output {{ name: "y{i}" data_type: TYPE_INT64 dims: [ -1 ] }}\n' for i in range(count))
    code = f"""
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                tensors = [pb_utils.Tensor(f"y{{i}}", np.full((1, 1024), i)) for i in range({count})]
                request.get_response_sender().send(pb_utils.InferenceResponse(tensors), 1)
    """
    config = DECOUPLED.replace('output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }\n', outputs)
    add_model(tmp_path, "m", code, config)
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request(x=row(1)))
        [response] = await client.rest()
        assert response.error_message == ""
        raw = response.infer_response.raw_output_contents
        assert [int.from_bytes(each[-8:], "little") for each in raw] == list(range(count))
        await client.close()


async def test_views_kept_by_a_thread_are_given_back(tmp_path):
    """The model lets go of an input while, before or after DONE is on its way."""
    code = """
    import queue, threading
    import numpy as np
    import triton_python_backend_utils as pb_utils
    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    class TritonPythonModel:
        def initialize(self, args):
            self.queue = queue.SimpleQueue()
            for _ in range(4):
                threading.Thread(target=self.work, daemon=True).start()
        def work(self):
            while True:
                sender, x = self.queue.get()
                total = np.array([[x.sum()]], np.int64)
                del x
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", total)]), FINAL)
                del sender
        def execute(self, requests):
            for request in requests:
                self.queue.put((request.get_response_sender(), request.inputs()[0].as_numpy()))
    """
    add_model(tmp_path, "m", code, DECOUPLED)
    async with serving(tmp_path) as engine:
        arena = arena_of("m")
        before = arena.used

        async def ask_many() -> None:
            client = Client(engine)
            for i in range(50):
                client.send(request(x=np.full((1, 32768), i)))
                assert number(await client.next()) == 32768 * i
            await client.close()

        await asyncio.gather(*(ask_many() for _ in range(4)))
        await until(lambda: arena.used <= before)  # the last responses are still being read


async def test_the_time_of_a_decoupled_step_is_in_the_phases_of_the_ensemble(tmp_path):
    """Guards that the ensemble's time is told: what a sender answers has no batch whose phases it could have."""
    add_model(tmp_path, "m", COUNTDOWN, DECOUPLED)
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(
        ensemble(step("m", {"x": "x"}, {"y": "y"}), extra="model_transaction_policy { decoupled: true }")
    )
    async with serving(tmp_path) as engine:
        client = Client(engine)
        client.send(request("e", x=row(2)))
        assert [number(response) for response in await client.rest()] == [2, 1]
        await client.close()
        found = engine.model("e").statistics().inference_stats
        assert found.success.count == 1
        assert 0 < found.compute_infer.ns <= found.success.ns - found.queue.ns


RESPONDS_LATER = """
import os, pathlib, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.told = pathlib.Path(args["model_repository"]) / "told"

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.respond, args=(request.get_response_sender(),)).start()

    def respond(self, sender):
        self.told.read_text()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 1), np.int64))]),
                    pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

SAMPLE = """
model_warmup {
  name: "s" batch_size: 1
  inputs { key: "x" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }
}
"""


@pytest.fixture
def many_descriptors():
    """This process has more than 1024 of them."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, usual[1]) if usual[1] > 0 else 4096, usual[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)


async def test_a_warm_up_that_is_answered_later_beside_many_connections(tmp_path, many_descriptors):
    add_model(tmp_path, "m", RESPONDS_LATER, DECOUPLED + SAMPLE)
    os.mkfifo(tmp_path / "m" / "told")
    told = asyncio.create_task(asyncio.to_thread((tmp_path / "m" / "told").write_text, "respond"))
    async with serving(tmp_path) as engine:
        await told
        assert engine.model("m").ready
