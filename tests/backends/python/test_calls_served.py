"""Models that call other models, through a real server: chains, errors, streams, deadlines, cancellation."""

import psutil
import pytest

from inferd.backends.python.process import CALLS
from inferd.backends.python.worker import protocol
from tests.backends.python.served import CONFIG, MISCHIEF, add_model, ask, serving
from tests.engine.serving import Pending, request, row
from tests.waiting import until

# Adds one, after having asked the model that is named like itself with one letter less.
CHAIN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.next = args["model_name"][:-1]

    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0]
            if self.next:
                call = pb_utils.InferenceRequest(
                    model_name=self.next, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x.as_numpy())])
                answer = call.exec()
                if answer.has_error():
                    answers.append(pb_utils.InferenceResponse(error=answer.error()))
                    continue
                values = pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()
            else:
                values = x.as_numpy()
                if values.flat[0] == -1:
                    answers.append(pb_utils.InferenceResponse(
                        error=pb_utils.TritonError("no further", pb_utils.TritonError.UNSUPPORTED)))
                    continue
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", values + 1)]))
        return answers
"""


# Asks the other one of "m" and "n" so often as x says.
RING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.other = {"m": "n", "n": "m"}[args["model_name"]]

    def execute(self, requests):
        [request] = requests
        x = request.inputs()[0].as_numpy()
        if x.flat[0] == 0:
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
        answer = pb_utils.InferenceRequest(
            model_name=self.other, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x - 1)]).exec()
        if answer.has_error():
            return [pb_utils.InferenceResponse(error=answer.error())]
        return [pb_utils.InferenceResponse(answer.output_tensors())]
"""

SLOW = """
import pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.told = pathlib.Path(args["model_repository"]) / "told"

    def execute(self, requests):
        [request] = requests
        self.told.write_text("began")
        while not request.is_cancelled():
            time.sleep(0.001)
        self.told.write_text("cancelled")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])]
"""


# Asks "size", which answers with the number of elements, with as many as x says.
LARGE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        [request] = requests
        x = request.inputs()[0].as_numpy()
        if x.size > 1:
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[x.size]]))])]
        zeros = pb_utils.Tensor("x", np.zeros((1, x.item()), int))
        answer = pb_utils.InferenceRequest(model_name="size", requested_output_names=["y"], inputs=[zeros]).exec()
        return [pb_utils.InferenceResponse(answer.output_tensors(), answer.error())]
"""


async def test_the_time_of_a_model_that_is_called_adds_up(tmp_path):
    """A called model's time in the queue begins when the call does, not when the caller's request came."""
    async with serving(tmp_path, a=CHAIN, ab=CHAIN) as engine:
        for _ in range(5):
            await ask(engine, 1, model="ab")
        said = engine.model("a").statistics().inference_stats
        parts = said.queue.ns + said.compute_input.ns + said.compute_infer.ns + said.compute_output.ns
        assert (said.success.count, said.success.ns) == (5, parts)


async def test_what_is_called_is_kept_for_the_caller_who_is_served(tmp_path):
    """Where callers are kept apart, no caller learns by a called model's cache what others ask its callers."""
    add_model(tmp_path, "a", CHAIN, CONFIG + "response_cache { enable: true }")
    async with serving(tmp_path, ab=CHAIN) as engine:
        engine.infer.keep_responses(1 << 20)
        engine.infer.set_callers_apart(sequences=True, responses=True)
        hits = []
        for caller in (7, 7, 8, 8, 0, 0):
            answer = await Pending(engine, request("ab", x=row(1)), caller=caller).answer()
            assert answer.array().item() == 3
            hits.append(engine.infer.reuse()["hits"])
        assert hits == [0, 1, 1, 2, 2, 3]


async def test_one_call_may_be_larger_than_all_calls_together_may_be(tmp_path):
    """The limit of bytes keeps a worker from making more calls, not from making its largest."""
    if psutil.virtual_memory().available < 6 << 30:
        pytest.skip("6 GiB of memory are needed")
    elements = (1 << 30) // 8 + 1
    async with serving(tmp_path, large=LARGE, size=LARGE) as engine:
        answer = await ask(engine, elements, model="large")
        assert (answer.status, answer.text) == (0, "")
        assert answer.array().item() == elements


async def until_told(root, model, word):
    """Wait until the model has written this."""
    told = root / model / "told"

    await until(lambda: told.exists() and told.read_text() == word, f"{model} does not tell {word!r}")


async def test_the_deadline_is_inherited(tmp_path):
    add_model(tmp_path, "a", SLOW)
    async with serving(tmp_path, ab=CHAIN) as engine:
        for seconds in (0.5, 5, 50):
            answer = await ask(engine, 1, model="ab", timeout_ns=int(seconds * 1e9))
            assert answer.status == 4
            if (tmp_path / "a" / "told").exists():  # it is not, where the deadline passed before "a" was called
                break
        await until_told(tmp_path, "a", "cancelled")


async def test_models_that_wait_for_each_other_do_so_until_the_deadline(tmp_path, caplog):
    """The one instance of each waits for that of the other. The log names both, once; both serve on."""

    def told():
        return [record.getMessage() for record in caplog.records if "waits for this call" in record.getMessage()]

    async with serving(tmp_path, m=RING, n=RING) as engine:
        assert (await ask(engine, 1)).array().tolist() == [[0]]
        assert not told()
        for _ in range(2):
            assert (await ask(engine, 2, timeout_ns=500_000_000)).status == 4
        [line] = told()
        assert line.startswith("model 'n' calls 'm', and every instance of 'm' waits for this call: ")
        assert (await ask(engine, 1)).array().tolist() == [[0]]
        assert (await ask(engine, 1, model="n")).array().tolist() == [[0]]


async def test_a_free_instance_takes_the_call_of_its_model(tmp_path, caplog):
    """Two instances of one model let one request of it call another one of it."""
    add_model(tmp_path, "m", RING, CONFIG.replace("count: 1", "count: 2"))
    async with serving(tmp_path, n=RING) as engine:
        assert (await ask(engine, 2)).array().tolist() == [[0]]
    assert "waits for this call" not in caplog.text


async def test_cancellation_is_inherited(tmp_path):
    add_model(tmp_path, "a", SLOW)
    async with serving(tmp_path, ab=CHAIN) as engine:
        pending = Pending(engine, request("ab", x=row(1)))
        await until_told(tmp_path, "a", "began")
        pending.ticket.cancel()
        await until_told(tmp_path, "a", "cancelled")


async def test_a_dead_callee_is_an_error_and_a_dead_caller_takes_its_calls_along(tmp_path):
    dies = """
    import os
    class TritonPythonModel:
        def execute(self, requests):
            os._exit(1)
    """
    caller = f"""
    import os, pathlib, threading, time
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            call = pb_utils.InferenceRequest(model_name="slow", requested_output_names=["y"],
                                             inputs=[pb_utils.Tensor("x", requests[0].inputs()[0].as_numpy())])
            threading.Thread(target=self.die).start()
            call.exec()
        def die(self):
            while not pathlib.Path({str(tmp_path / "slow" / "told")!r}).exists():
                time.sleep(0.001)
            os._exit(1)
    """
    add_model(tmp_path, "slow", SLOW)
    async with serving(tmp_path, a=dies, ab=CHAIN, caller=caller) as engine:
        answer = await ask(engine, 1, model="ab")
        assert answer.status == 14
        assert "exited with status 1" in answer.text
        assert (await ask(engine, 1, model="caller")).status == 14
        await until_told(tmp_path, "slow", "cancelled")


MISFIT = "sent a packet that does not fit its head"


@pytest.mark.parametrize(
    ("packet", "rule"),
    [
        (b"too short", "sent a packet without a head"),
        # belongs on the side socket
        (protocol.HEAD.pack(protocol.BLS_REQUEST, protocol.IN_ARENA, 0, 100, 1, 0), MISFIT),
        (protocol.HEAD.pack(protocol.BLS_REQUEST, 0, 0, 100, 1, 0) + b"less", MISFIT),
        # than the head of a call
        (protocol.HEAD.pack(protocol.BLS_REQUEST, 0, 0, 4, 1, 0) + b"less", "sent a call that cannot be read"),
        (protocol.HEAD.pack(protocol.DONE, 0, 0, 0, 1, 0), "sent a packet of an unknown kind on the socket of calls"),
    ],
)
async def test_a_worker_that_sends_nonsense_where_the_loop_reads_is_ended(tmp_path, packet, rule):
    code = f"""
    import os, time
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].inputs()[0].as_numpy().flat[0] < 0:
                os.write({CALLS}, {packet!r})
                time.sleep(3600)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
    """
    async with serving(tmp_path, m=code) as engine:
        answer = await ask(engine, -1)
        assert answer.status == 14
        assert answer.text.endswith(f"message: its worker was ended because it {rule}")
        assert (await ask(engine, 1)).array().tolist() == [[1]]


WITHOUT_THREADS = """
import threading
import triton_python_backend_utils as pb_utils
start = threading.Thread.start

def refuse(thread):
    if thread.name == "inferd-calls":
        raise RuntimeError("can't start new thread")
    start(thread)

class TritonPythonModel:
    async def execute(self, requests):
        [request] = requests
        call = pb_utils.InferenceRequest(model_name="other", inputs=request.inputs())
        threading.Thread.start = refuse
        try:
            await call.async_exec()
        except RuntimeError:
            return [pb_utils.InferenceResponse(call.exec().output_tensors())]
"""


async def test_a_call_goes_through_after_one_for_which_no_thread_could_be_made(tmp_path):
    async with serving(tmp_path, m=WITHOUT_THREADS, other=MISCHIEF) as engine:
        assert (await ask(engine, 7)).array().tolist() == [[7]]


COUNTS = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.go = pathlib.Path(args["model_repository"]).parent / "go"

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(4):
                while number == 1 and not self.go.exists():
                    time.sleep(0.001)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[number]], np.int64))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
GIVES_UP_ONCE = """
import asyncio, pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.go = pathlib.Path(args["model_repository"]).parent / "go"

    async def execute(self, requests):
        [request] = requests
        call = pb_utils.InferenceRequest(model_name="counts", inputs=request.inputs())
        responses = await call.async_exec(decoupled=True)
        found = [await responses.__anext__()]
        waiting = asyncio.ensure_future(responses.__anext__())
        await asyncio.sleep(0)
        self.go.touch()
        while not responses._call._future.done():
            await asyncio.sleep(0)
        waiting.cancel()  # as a time limit does, just when the response has come
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        found += [response async for response in responses]
        y = [response.output_tensors()[0].as_numpy().item() for response in found if response.output_tensors()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([y], np.int64))])]
"""


async def test_a_response_that_comes_as_its_coroutine_is_cancelled_is_not_lost(tmp_path):
    add_model(tmp_path, "counts", COUNTS, CONFIG + "model_transaction_policy { decoupled: true }\n")
    async with serving(tmp_path, m=GIVES_UP_ONCE) as engine:
        assert (await ask(engine, 1)).array().tolist() == [[0, 1, 2, 3]]
