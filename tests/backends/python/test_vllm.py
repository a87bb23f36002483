"""A Python-based backend in the form of vLLM's for Triton, with a stand-in for the engine.

Its program uses the interfaces of the Python backend as that one does, in the same order: it completes its models,
an engine runs in an event loop on a thread of its own, coroutines send responses or have another thread send them, and
`finalize` waits for what is open.
"""

from __future__ import annotations

import json
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.backends.python.test_inflight_batcher import Stream, texts
from tests.backends.python.test_tritonclient import tensor
from tests.conformance import doors
from tests.waiting import wait_until

PROGRAM = """
    import asyncio, gc, json, os, queue, threading, traceback

    import numpy as np
    import triton_python_backend_utils as pb_utils

    from utils.engine import build_engine
    from utils.metrics import StatLoggerFactory
    from utils.request import EmbedRequest, GenerateRequest

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    class TritonPythonModel:
        @classmethod
        def auto_complete_config(cls, auto_complete_model_config):
            flags = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
            inputs = [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
            inputs.append({"name": "image", "data_type": "TYPE_STRING", "dims": [-1], "optional": True})
            for name in ("stream", "exclude_input_in_output", *flags):
                inputs.append({"name": name, "data_type": "TYPE_BOOL", "dims": [1], "optional": True})
            for name in ("sampling_parameters", "embedding_request"):
                inputs.append({"name": name, "data_type": "TYPE_STRING", "dims": [1], "optional": True})
            outputs = [
                {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]},
                {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [-1]},
                {"name": "num_input_tokens", "data_type": "TYPE_UINT32", "dims": [1]},
                {"name": "num_output_tokens", "data_type": "TYPE_UINT32", "dims": [-1]},
            ]
            config = auto_complete_model_config.as_dict()
            known = {tensor["name"] for tensor in config["input"] + config["output"]}
            for tensor in inputs:
                if tensor["name"] not in known:
                    auto_complete_model_config.add_input(tensor)
            for tensor in outputs:
                if tensor["name"] not in known:
                    auto_complete_model_config.add_output(tensor)
            auto_complete_model_config.set_model_transaction_policy(dict(decoupled=True))
            auto_complete_model_config.set_max_batch_size(0)
            return auto_complete_model_config

        def initialize(self, args):
            self.args = args
            self.logger = pb_utils.Logger
            self.model_config = json.loads(args["model_config"])
            described = pb_utils.get_output_config_by_name(self.model_config, "text_output")
            self.output_dtype = pb_utils.triton_string_to_numpy(described["data_type"])
            self.checks_health = self.flag("ENABLE_VLLM_HEALTH_CHECK")
            self.is_healthy = True

            assert pb_utils.using_decoupled_model_transaction_policy(self.model_config)
            with open(os.path.join(pb_utils.get_model_dir(), "model.json")) as file:
                self.engine_args = json.load(file)
            kind, device = args["model_instance_kind"], int(args["model_instance_device_id"])
            self.logger.log_info(f"[vllm] an instance of kind {kind} on device {device}")

            self.metrics = []
            if self.flag("REPORT_CUSTOM_METRICS"):
                labels = {"model": args["model_name"], "version": args["model_version"]}
                try:
                    self.metrics.append(StatLoggerFactory(labels, self.logger))
                except pb_utils.TritonModelException as error:
                    if "metrics not supported" not in str(error):
                        raise

            self.engine = None
            self.started = threading.Condition()
            self.shutdown = asyncio.Event()
            self.event_thread = threading.Thread(target=asyncio.run, args=(self.run_engine(),))
            self.event_thread.start()
            with self.started:
                while self.engine is None:
                    self.started.wait()
            if isinstance(self.engine, Exception):
                self.event_thread.join()
                raise self.engine
            tasks = self.engine.get_supported_tasks()
            self.supported_tasks = asyncio.run_coroutine_threadsafe(tasks, self.event_loop).result()

            self.response_queue = queue.Queue()
            self.response_thread = threading.Thread(target=self.response_loop)
            self.response_thread.start()

        def flag(self, name):
            given = self.model_config["parameters"]
            return name in given and given[name]["string_value"].lower() == "true"

        async def run_engine(self):
            self.ongoing = 0
            try:
                async with build_engine(self.engine_args, self.metrics) as engine:
                    self.event_loop = asyncio.get_running_loop()
                    with self.started:
                        self.engine = engine
                        self.started.notify_all()
                    await self.shutdown.wait()
                    while self.ongoing > 0:
                        self.logger.log_info(f"[vllm] Awaiting remaining {self.ongoing} requests")
                        await asyncio.sleep(0.05)
                    for task in asyncio.all_tasks(loop=self.event_loop):
                        if task is not asyncio.current_task():
                            task.cancel()
            except Exception as error:
                with self.started:
                    if self.engine is None:
                        self.engine = error
                        self.started.notify_all()
                        return
                raise
            self.engine = None
            self.logger.log_info("[vllm] Shutdown complete")

        def response_loop(self):
            while True:
                item = self.response_queue.get()
                if item is None:
                    break
                state, response, flags = item
                sender = state["response_sender"]
                try:
                    sender.send(response, flags)
                    if not state["last_response_generated"]:
                        state["is_cancelled"] = sender.is_cancelled()
                except Exception:
                    self.logger.log_error(f"An error occurred while sending a response: {traceback.format_exc()}")
                finally:
                    if flags == FINAL:
                        self.ongoing -= 1

        def execute(self, requests):
            if self.checks_health and not self.check_health(requests):
                return None
            for request in requests:
                if self.verify_lora(request):
                    assert not self.shutdown.is_set(), "Cannot create tasks after shutdown has been requested"
                    asyncio.run_coroutine_threadsafe(self.infer(request), self.event_loop)
            return None

        def verify_lora(self, request):
            given = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            parameters = given.as_numpy()[0].decode("utf-8") if given else request.parameters()
            if json.loads(parameters).pop("lora_name", None) is None:
                return True
            error = pb_utils.TritonError("LoRA feature is not enabled.")
            self.logger.log_info("[vllm] LoRA is not enabled, please restart the backend with LoRA enabled.")
            text = pb_utils.Tensor("text_output", np.asarray([error.message()], dtype=self.output_dtype))
            response = pb_utils.InferenceResponse(output_tensors=[text], error=error)
            request.get_response_sender().send(response, flags=FINAL)
            return False

        def check_health(self, requests):
            try:
                asyncio.run_coroutine_threadsafe(self.engine.check_health(), self.event_loop).result()
            except Exception:
                self.logger.log_error(f"[vllm] Engine is not healthy: {traceback.format_exc()}")
                pb_utils.unload_model(self.model_config["name"])
                self.is_healthy = False
            if not self.is_healthy:
                error = pb_utils.TritonError(
                    message="Model is unavailable due to unhealthy vLLM engine", code=pb_utils.TritonError.UNAVAILABLE)
                for request in requests:
                    request.get_response_sender().send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            return self.is_healthy

        async def infer(self, request):
            sender = request.get_response_sender()
            state = {"response_sender": sender, "is_cancelled": False, "last_response_generated": False}
            self.ongoing += 1
            is_counted_here = True
            try:
                is_embedding = pb_utils.get_input_tensor_by_name(request, "embedding_request") is not None
                task = "embed" if is_embedding else "generate"
                if task not in self.supported_tasks:
                    raise ValueError(f"Model {self.args['model_name']} does not support '{task}' request")
                made = (EmbedRequest if is_embedding else GenerateRequest)(request, self.engine, self.output_dtype)
                outputs_state = {}
                async for output in made.execute():
                    is_cancelled = state["is_cancelled"]
                    if not made.stream:
                        is_cancelled = sender.is_cancelled()
                    if is_cancelled:
                        self.logger.log_info("[vllm] Cancelling the request")
                        await self.engine.abort(made.id)
                        self.logger.log_info(f"[vllm] Successfully cancelled '{request.request_id()}'")
                        if made.stream:
                            state["last_response_generated"] = True
                            error = pb_utils.TritonError(
                                message="Request was cancelled", code=pb_utils.TritonError.CANCELLED)
                            is_counted_here = False
                            response = pb_utils.InferenceResponse(error=error)
                            self.response_queue.put_nowait((state, response, FINAL))
                        break
                    if made.stream:
                        response = made.response(output, outputs_state, prepend_input=False)
                        flags = 0
                        if output.finished:
                            state["last_response_generated"] = True
                            flags = FINAL
                            is_counted_here = False
                        self.response_queue.put_nowait((state, response, flags))
                if not made.stream:
                    sender.send(made.response(output, {}, prepend_input=made.prepend_input), flags=FINAL)
            except Exception as error:
                self.logger.log_error(f"[vllm] Error generating stream: {traceback.format_exc()}")
                told = pb_utils.TritonError(f"Error generating stream: {error}")
                text = pb_utils.Tensor("text_output", np.asarray(["N/A"], dtype=self.output_dtype))
                sender.send(pb_utils.InferenceResponse(output_tensors=[text], error=told), flags=FINAL)
                raise
            finally:
                if is_counted_here:
                    self.ongoing -= 1

        def finalize(self):
            self.logger.log_info("[vllm] Issuing finalize to vllm backend")
            self.event_loop.call_soon_threadsafe(self.shutdown.set)
            self.event_thread.join()
            self.response_queue.put(None)
            self.response_thread.join()
            for factory in self.metrics:
                factory.finalize()
            gc.collect()
            self.logger.log_info("[vllm] Garbage Collector on finalize... done")
"""
# Each token is the next letter of the prompt; a step of the engine takes a moment, as one on a device does.
ENGINE = """
    import asyncio, itertools, os
    from contextlib import asynccontextmanager
    from types import SimpleNamespace

    STEP = 0.001

    class Engine:
        def __init__(self, args, stat_loggers):
            self.args, self.stat_loggers, self.aborted = args, stat_loggers, set()

        async def get_supported_tasks(self):
            return ("generate", "embed") if self.args.get("embeds") else ("generate",)

        async def check_health(self):
            if self.args.get("is_sick"):
                raise RuntimeError("the engine's process is gone")

        async def abort(self, request_id):
            self.aborted.add(request_id)

        async def generate(self, prompt, parameters, request_id):
            text, most = "", int(parameters.get("max_tokens", 16))
            for number in itertools.count(1):
                await asyncio.sleep(STEP)
                assert request_id not in self.aborted, "an aborted request goes on"
                if prompt == "poison" and number == 3:
                    raise RuntimeError("the engine chokes on this")
                text += prompt[(number - 1) % len(prompt)]
                finished = number >= most
                output = SimpleNamespace(
                    text=text, token_ids=list(range(number)), finish_reason="length" if finished else None)
                for logger in self.stat_loggers:
                    logger.record(len(prompt) if number == 1 else 0, 1, STEP)
                yield SimpleNamespace(
                    prompt=prompt, prompt_token_ids=list(prompt), outputs=[output], finished=finished)
                if finished:
                    return

        async def encode(self, prompt, request_id):
            yield SimpleNamespace(embedding=[float(len(prompt))], finished=True)

    @asynccontextmanager
    async def build_engine(args, factories):
        if args.get("is_broken"):
            raise ValueError("the engine has no such model")
        yield Engine(args, [factory() for factory in factories])
"""
REQUEST = """
    import json, uuid
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class GenerateRequest:
        def __init__(self, request, engine, output_dtype):
            self.request, self.engine, self.output_dtype = request, engine, output_dtype
            self.id, self.stream, self.prepend_input = uuid.uuid4().hex, False, False

        def flag(self, name):
            tensor = pb_utils.get_input_tensor_by_name(self.request, name)
            return bool(tensor.as_numpy()[0]) if tensor else False

        async def execute(self):
            prompt = pb_utils.get_input_tensor_by_name(self.request, "text_input").as_numpy()[0]
            if isinstance(prompt, bytes):
                prompt = prompt.decode("utf-8")
            assert pb_utils.get_input_tensor_by_name(self.request, "image") is None
            self.stream = self.flag("stream")
            excludes = pb_utils.get_input_tensor_by_name(self.request, "exclude_input_in_output")
            if excludes:
                self.prepend_input = not excludes.as_numpy()[0]
            else:
                self.prepend_input = not self.stream
            if self.prepend_input and self.stream:
                raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
            given = pb_utils.get_input_tensor_by_name(self.request, "sampling_parameters")
            parameters = given.as_numpy()[0].decode("utf-8") if given else self.request.parameters()
            names = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
            self.wanted = {name for name in names if self.flag(name)}
            async for output in self.engine.generate(prompt, json.loads(parameters), self.id):
                yield output

        def response(self, output, state, prepend_input):
            said = output.outputs
            prompt = output.prompt if prepend_input and "text" not in state else ""
            before = state.get("text", [0] * len(said))
            texts = [(prompt + each.text[length:]).encode("utf-8") for each, length in zip(said, before)]
            state["text"] = [len(each.text) for each in said]
            tensors = [pb_utils.Tensor("text_output", np.asarray(texts, dtype=self.output_dtype))]
            if "return_finish_reason" in self.wanted:
                reasons = [str(each.finish_reason) for each in said]
                tensors.append(pb_utils.Tensor("finish_reason", np.asarray(reasons, dtype=np.object_)))
            if "return_num_input_tokens" in self.wanted:
                number = np.asarray(len(output.prompt_token_ids), dtype=np.uint32)
                tensors.append(pb_utils.Tensor("num_input_tokens", number))
            if "return_num_output_tokens" in self.wanted:
                counted = state.get("tokens", [0] * len(said))
                state["tokens"] = [len(each.token_ids) for each in said]
                numbers = [now - past for now, past in zip(state["tokens"], counted)]
                tensors.append(pb_utils.Tensor("num_output_tokens", np.asarray(numbers, dtype=np.uint32)))
            return pb_utils.InferenceResponse(output_tensors=tensors)

    class EmbedRequest(GenerateRequest):
        async def execute(self):
            given = pb_utils.get_input_tensor_by_name(self.request, "embedding_request").as_numpy()[0]
            async for output in self.engine.encode(json.loads(given.decode("utf-8"))["input"], self.id):
                yield output

        def response(self, output, state, prepend_input):
            text = json.dumps({"embedding": output.embedding}).encode()
            return pb_utils.InferenceResponse(
                output_tensors=[pb_utils.Tensor("text_output", np.asarray([text], dtype=self.output_dtype))])
"""
METRICS = """
    import queue, threading
    import triton_python_backend_utils as pb_utils

    class StatLoggerFactory:
        def __init__(self, labels, log):
            self.labels, self.log, self.made = labels, log, []

        def __call__(self):
            self.made.append(StatLogger(self.labels, self.log))
            return self.made[-1]

        def finalize(self):
            for each in self.made:
                each.finalize()

    class StatLogger:
        def __init__(self, labels, log):
            def family(name, kind):
                return pb_utils.MetricFamily(name=name, description=f"It is {name}.", kind=kind)
            counter, histogram = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.HISTOGRAM
            # The families are kept, as a metric does not keep its family.
            self.families = [
                family("vllm:prompt_tokens_total", counter), family("vllm:generation_tokens_total", counter),
                family("vllm:time_per_output_token_seconds", histogram),
            ]
            self.prompt, self.generation = (each.Metric(labels=labels) for each in self.families[:2])
            self.latency = self.families[2].Metric(labels=labels, buckets=[0.1, 1.0, 600.0])
            self.log, self.queue = log, queue.Queue()
            self.thread = threading.Thread(target=self.loop)
            self.thread.start()

        def record(self, prompt_tokens, generation_tokens, seconds):
            for metric, value in ((self.prompt, prompt_tokens), (self.generation, generation_tokens)):
                if value:
                    self.queue.put_nowait((metric, "increment", value))
            self.queue.put_nowait((self.latency, "observe", seconds))

        def loop(self):
            while (item := self.queue.get()) is not None:
                metric, command, value = item
                getattr(metric, command)(value)

        def finalize(self):
            self.queue.put(None)
            self.thread.join()
"""
CONFIG = """
# Nothing else is configured.
backend: "vllm"

instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""


def write_backend(directory: Path) -> Path:
    """The folder that `--backend-directory` gets, with the backend `vllm`."""
    folder = directory / "vllm"
    (folder / "utils").mkdir(parents=True)
    (folder / "model.py").write_text(textwrap.dedent(PROGRAM))
    for name, code in {"engine": ENGINE, "request": REQUEST, "metrics": METRICS}.items():
        (folder / "utils" / f"{name}.py").write_text(textwrap.dedent(code))
    return directory


def add_model(repository: Path, name: str, *flags: str, **engine: Any) -> None:
    """A model of the backend: `flags` are parameters that are true, `engine` is what its model.json says."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(engine))
    given = "".join(f'parameters: {{ key: "{flag}" value: {{ string_value: "true" }} }}\n' for flag in flags)
    (version.parent / "config.pbtxt").write_text(CONFIG + given)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[doors.Process, str]]:
    """The server, and the address of its metrics. The model `unloaded` is there for one test alone."""
    root = tmp_path_factory.mktemp("vllm")
    models = root / "models"
    for name in ("vllm_model", "unloaded"):
        add_model(models, name, "REPORT_CUSTOM_METRICS", model="stand-in", embeds=name == "vllm_model")
    add_model(models, "sick", "ENABLE_VLLM_HEALTH_CHECK", is_sick=True)
    add_model(models, "broken", is_broken=True)
    arguments = ("--model-control-mode", "explicit", "--load-model", "*", "--metrics-port", "0")
    backends = str(write_backend(root / "backends"))
    with doors.running_server("native", models, "--backend-directory", backends, *arguments) as process:
        line = process.says("Started Metrics Service at")
        yield process, line.rsplit(" ", 1)[1].strip('"')


@pytest.fixture
def stream(served: tuple[doors.Process, str]) -> Iterator[Stream]:
    with Stream(served[0].address) as opened:
        yield opened


def flag(name: str, value: bool = True) -> triton.InferInput:
    return tensor(name, np.array([value]))


def text(name: str, value: str) -> triton.InferInput:
    return tensor(name, np.array([value.encode()], object))


def generate(stream: Stream, prompt: str, *more: triton.InferInput, model: str = "vllm_model", **options: Any) -> None:
    inputs = [text("text_input", prompt), *more]
    stream.client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)


def sampling(**values: Any) -> triton.InferInput:
    return text("sampling_parameters", json.dumps({key: str(value) for key, value in values.items()}))


def test_the_configuration_is_completed(stream: Stream) -> None:
    config = stream.client.get_model_config("vllm_model").config
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert config.output[0].name == "text_output"
    assert {each.name for each in config.input if not each.optional} == {"text_input"}
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, group.KIND_MODEL)


def test_a_stream_gets_the_new_text_of_each_step(stream: Stream) -> None:
    generate(stream, "abc", flag("stream"), sampling(max_tokens=5, temperature=0.1), request_id="one")
    answers = stream.all()
    assert texts(answers) == ["a", "b", "c", "a", "b"]
    assert {answer.get_response().id for answer in answers} == {"one"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), "abcabca"),
        ((flag("exclude_input_in_output"),), "abca"),
        ((flag("exclude_input_in_output", False),), "abcabca"),
        ((flag("stream", False), flag("exclude_input_in_output")), "abca"),
    ],
)
def test_a_whole_answer_has_the_prompt_unless_it_is_excluded(stream: Stream, more: Any, expected: str) -> None:
    generate(stream, "abc", *more, sampling(max_tokens=4))
    assert texts(stream.all()) == [expected]


def test_sampling_parameters_may_be_parameters_of_the_request(stream: Stream) -> None:
    generate(stream, "abc", flag("stream"), parameters={"max_tokens": 2, "temperature": "0.1"})
    assert texts(stream.all()) == ["a", "b"]


def test_the_further_outputs_that_a_request_asks_for_are_sent(stream: Stream) -> None:
    names = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    generate(stream, "ab", flag("stream"), *map(flag, names), sampling(max_tokens=2))
    answers = stream.all()
    assert [answer.as_numpy("finish_reason").tolist() for answer in answers] == [[b"None"], [b"length"]]
    assert [answer.as_numpy("num_output_tokens").tolist() for answer in answers] == [[1], [1]]
    # The backend makes this one without a dim, and Triton sends it so.
    shapes = [list(answer.get_output("num_input_tokens").shape) for answer in answers]
    assert shapes == [[], []]
    assert [answer.as_numpy("num_input_tokens").item() for answer in answers] == [2, 2]


def test_a_request_for_an_embedding_gets_it_as_json(stream: Stream) -> None:
    generate(stream, "", text("embedding_request", '{"input": "four"}'))
    (answer,) = stream.all()
    assert json.loads(answer.as_numpy("text_output")[0]) == {"embedding": [4.0]}


@pytest.mark.parametrize(
    ("prompt", "more", "error"),
    [
        ("a", (flag("stream"), flag("exclude_input_in_output", False)), "Error generating stream: When streaming, "),
        ("a", (text("sampling_parameters", '{"lora_name": "x"}'),), "^LoRA feature is not enabled.$"),
        ("a", (text("sampling_parameters", "no json"),), "Expecting value"),
        ("poison", (), "^Error generating stream: the engine chokes on this$"),
    ],
    ids=["contradiction", "adapter", "parameters", "engine"],
)
def test_errors(stream: Stream, prompt: str, more: Any, error: str) -> None:
    """The request ends with the error; the next one on the same stream is answered."""
    generate(stream, prompt, *more)
    with pytest.raises(InferenceServerException, match=error):
        stream.all()
    generate(stream, "z", sampling(max_tokens=1))
    while not (answer := stream.next()).get_response().outputs:
        pass  # the end of the one that failed
    assert texts([answer]) == ["zz"]


def test_an_error_in_the_middle_comes_behind_the_text(stream: Stream) -> None:
    generate(stream, "poison", flag("stream"))
    assert texts([stream.next(), stream.next()]) == ["p", "o"]
    with pytest.raises(InferenceServerException, match="the engine chokes on this"):
        stream.next()


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
def test_a_cancelled_request_is_aborted(served: tuple[doors.Process, str], streams: bool) -> None:
    process, _ = served
    leaving = Stream(process.address)
    name = f"left {streams}"
    generate(leaving, "abc", flag("stream", streams), sampling(max_tokens=10**9), request_id=name)
    if streams:
        leaving.next()
    else:  # the model has it as soon as one that came later has answered
        generate(leaving, "z", sampling(max_tokens=1))
        leaving.next()
    leaving.client.stop_stream(cancel_requests=True)
    leaving.client.close()
    process.says(f"[vllm] Successfully cancelled '{name}'")


def test_metrics_of_the_engine(served: tuple[doors.Process, str], stream: Stream) -> None:
    _, address = served
    generate(stream, "abc", sampling(max_tokens=4))
    stream.all()

    def page() -> str:
        with urllib.request.urlopen(address) as answer:
            return answer.read().decode()

    def value(name: str) -> float:
        of_the_model = f'vllm:{name}{{model="vllm_model",version="1"'
        return sum(float(line.rsplit(" ", 1)[1]) for line in page().splitlines() if line.startswith(of_the_model))

    wait_until(lambda: value("generation_tokens_total") >= 4, "the tokens are not counted")
    assert value("prompt_tokens_total") >= 3
    assert value("time_per_output_token_seconds_count") >= 4


def test_an_engine_that_does_not_start_fails_the_load(served: tuple[doors.Process, str], stream: Stream) -> None:
    with pytest.raises(InferenceServerException, match="the engine has no such model"):
        stream.client.load_model("broken")
    assert not stream.client.is_model_ready("broken")


def test_a_sick_engine_unloads_its_own_model(stream: Stream) -> None:
    assert stream.client.is_model_ready("sick")
    generate(stream, "abc", model="sick")
    with pytest.raises(InferenceServerException, match="unavailable due to unhealthy vLLM engine"):
        stream.all()
    wait_until(lambda: not stream.client.is_model_ready("sick"), "the model is still loaded")


def test_an_unload_waits_for_requests(served: tuple[doors.Process, str], stream: Stream) -> None:
    """What runs gets all of its text, and the engine is shut down after it; nothing new is taken."""
    process, _ = served
    most = 300
    generate(stream, "ab", flag("stream"), sampling(max_tokens=most), model="unloaded")
    generate(stream, "c", sampling(max_tokens=most), model="unloaded", request_id="whole")
    first = stream.next()
    stream.client.unload_model("unloaded")
    with pytest.raises(InferenceServerException, match="unloaded"), Stream(process.address) as other:
        generate(other, "ab", model="unloaded")
        other.all()
    found = [first]
    ended = 0
    while ended < 2:
        found.append(stream.next())
        ended += found[-1].get_response().parameters["triton_final_response"].bool_param
    streamed = [answer for answer in found if answer.get_response().outputs and answer.get_response().id != "whole"]
    whole = [answer for answer in found if answer.get_response().outputs and answer.get_response().id == "whole"]
    assert "".join(texts(streamed)) == "ab" * (most // 2)
    assert texts(whole) == ["c" * (most + 1)]
    process.says("[vllm] Shutdown complete")
    stream.client.load_model("unloaded")
    generate(stream, "again", sampling(max_tokens=1), model="unloaded")
    assert texts(stream.all()) == ["againa"]
