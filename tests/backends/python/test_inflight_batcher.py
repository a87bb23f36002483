"""A repository in the form of TensorRT-LLM's `inflight_batcher_llm`, with an engine that repeats its prompt.

The configurations are our own. They use the fields, names and habits of those templates: placeholders that nobody
fills, an output that is listed twice, commas between some fields, and optional inputs that a request may not have.
"""

from __future__ import annotations

import json
import queue
import string
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from inferd.server import cli
from tests.backends.python.test_tritonclient import tensor
from tests.conformance import doors

FILLED = {
    "triton_backend": "python",
    "triton_max_batch_size": "8",
    "decoupled_mode": "True",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "2",
    "logits_datatype": "TYPE_FP32",
    "tokenizer_dir": "/opt/tokenizer",
    "engine_dir": "/opt/engine",
    "cancellation_check_period_ms": "1",
}
"""What the documentation tells people to fill. They leave the rest."""


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each `${name}` that has a value, as NVIDIA's script does."""
    return string.Template(template).safe_substitute(values)


BATCHING = """
dynamic_batching {
    preferred_batch_size: [ ${triton_max_batch_size} ]
    max_queue_delay_microseconds: ${max_queue_delay_microseconds}
    default_queue_policy: { max_queue_size: ${max_queue_size} }
}
"""
FLAGS = {"optional": "optional: true", "ragged": "allow_ragged_batch: true", "scalar": "reshape: { shape: [ ] }"}


def tensors(field: str, *described: str) -> str:
    """A list of tensors; each of `described` is a name, a datatype, dims and words of FLAGS."""
    made = []
    for name, datatype, dims, *flags in map(str.split, described):
        lines = [f'name: "{name}"', f"data_type: {datatype}", f"dims: [ {dims.replace(',', ', ')} ]"]
        made.append("  {\n    " + "\n    ".join((*lines, *(FLAGS[flag] for flag in flags))) + "\n  }")
    return f"{field} [\n" + ",\n  # a comment with `weights` and [ 1, 2 ] stands here\n".join(made) + "\n]\n"


def parameters(**values: str) -> str:
    return "".join(
        f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}\n'
        for key, value in values.items()
    )


def instances(count: str) -> str:
    return f"instance_group [\n  {{\n    count: {count}\n    kind : KIND_CPU\n  }}\n]\n"


def maps(field: str, **names: str) -> str:
    return ",\n".join(f'{field} {{\n  key: "{key}",\n  value: "{value}"\n}}' for key, value in names.items()) + "\n"


SAMPLING = (
    "beam_width TYPE_INT32 1 optional",
    "temperature TYPE_FP32 1 optional",
    "return_log_probs TYPE_BOOL 1 scalar optional",
    "lora_weights TYPE_FP16 -1,-1 optional ragged",
)
ANSWERED = (
    "cum_log_probs TYPE_FP32 -1",
    "output_log_probs TYPE_FP32 -1,-1",
    "context_logits ${logits_datatype} -1,-1",
    "batch_index TYPE_INT32 1",
    "kv_cache_alloc_total_blocks TYPE_INT32 1",
)
ASKED = (
    "text_input TYPE_STRING 1",
    "decoder_text_input TYPE_STRING 1 optional",
    "max_tokens TYPE_INT32 1",
    "stop_words TYPE_STRING -1 optional",
    "stream TYPE_BOOL 1 optional",
    *SAMPLING,
)
TEMPLATES = {
    "preprocessing": 'name: "preprocessing"\nbackend: "python"\nmax_batch_size: ${triton_max_batch_size}'
    + BATCHING
    + tensors(
        "input",
        "QUERY TYPE_STRING 1",
        "DECODER_QUERY TYPE_STRING 1 optional",
        "IMAGE_BYTES TYPE_UINT8 -1,-1,-1,-1 optional",
        "REQUEST_OUTPUT_LEN TYPE_INT32 1",
        "STOP_WORDS_DICT TYPE_STRING -1 optional",
    )
    + tensors(
        "output",
        "INPUT_ID TYPE_INT32 -1",
        "REQUEST_INPUT_LEN TYPE_INT32 1",
        "STOP_WORDS_IDS TYPE_INT32 2,-1",
        "REQUEST_OUTPUT_LEN TYPE_INT32 -1",
        "OUT_PROMPT_TABLE_EXTRA_IDS TYPE_UINT64 -1",
    )
    + parameters(tokenizer_dir="${tokenizer_dir}", add_special_tokens="${add_special_tokens}")
    + parameters(visual_model_path="${visual_model_path}", gpt_model_path="${engine_dir}")
    + instances("${preprocessing_instance_count}"),
    "tensorrt_llm": 'name: "tensorrt_llm"\nbackend: "${triton_backend}"\nmax_batch_size: ${triton_max_batch_size}\n'
    + "model_transaction_policy {\n  decoupled: ${decoupled_mode}\n}\n"
    + BATCHING
    + tensors(
        "input",
        "input_ids TYPE_INT32 -1 ragged optional",
        "input_lengths TYPE_INT32 1 scalar",
        "request_output_len TYPE_INT32 1 scalar",
        "stop_words_list TYPE_INT32 2,-1 optional ragged",
        "streaming TYPE_BOOL 1 scalar optional",
        "stop TYPE_BOOL 1 scalar optional",
        "random_seed TYPE_UINT64 1 scalar optional",
        "prompt_table_extra_ids TYPE_UINT64 -1 optional ragged",
        *(line if "scalar" in line or "ragged" in line else f"{line} scalar" for line in SAMPLING),
    )
    + tensors("output", "output_ids TYPE_INT32 -1,-1", "sequence_length TYPE_INT32 -1", *ANSWERED)
    + instances("1")
    + parameters(max_beam_width="${max_beam_width}", FORCE_CPU_ONLY_INPUT_TENSORS="no", gpt_model_path="${engine_dir}")
    + parameters(cancellation_check_period_ms="${cancellation_check_period_ms}", decoding_mode="${decoding_mode}")
    + parameters(executor_worker_path="/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"),
    "postprocessing": 'name: "postprocessing"\nbackend: "python"\nmax_batch_size: ${triton_max_batch_size}\n'
    + "dynamic_batching {}\n"
    + tensors("input", "TOKENS_BATCH TYPE_INT32 -1,-1", "SEQUENCE_LENGTH TYPE_INT32 -1")
    + tensors("output", "OUTPUT TYPE_STRING -1")
    + parameters(tokenizer_dir="${tokenizer_dir}", skip_special_tokens="${skip_special_tokens}")
    + instances("${postprocessing_instance_count}"),
    "tensorrt_llm_bls": 'name: "tensorrt_llm_bls"\nbackend: "python"\nmax_batch_size: ${triton_max_batch_size}\n'
    + "model_transaction_policy {\n  decoupled: ${decoupled_mode}\n}\n"
    + tensors("input", *ASKED).replace("TYPE_STRING\n", "TYPE_STRING,\n", 1)
    + tensors("output", "text_output TYPE_STRING -1", *ANSWERED)
    + parameters(accumulate_tokens="${accumulate_tokens}", tensorrt_llm_model_name="${tensorrt_llm_model_name}")
    + instances("${bls_instance_count}"),
    "ensemble": 'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: ${triton_max_batch_size}\n'
    + tensors("input", *ASKED)
    + tensors("output", "text_output TYPE_STRING -1", *ANSWERED, ANSWERED[-1])
    + 'ensemble_scheduling {\nstep [\n{ model_name: "preprocessing"\nmodel_version: -1\n'
    + maps("input_map", QUERY="text_input", DECODER_QUERY="decoder_text_input", REQUEST_OUTPUT_LEN="max_tokens")
    + maps("input_map", STOP_WORDS_DICT="stop_words")
    + maps("output_map", REQUEST_INPUT_LEN="_REQUEST_INPUT_LEN", INPUT_ID="_INPUT_ID", STOP_WORDS_IDS="_STOP_WORDS_IDS")
    + maps("output_map", REQUEST_OUTPUT_LEN="_REQUEST_OUTPUT_LEN", OUT_PROMPT_TABLE_EXTRA_IDS="_EXTRA_IDS")
    + '},\n{ model_name: "tensorrt_llm"\nmodel_version: -1\n'
    + maps("input_map", input_ids="_INPUT_ID", input_lengths="_REQUEST_INPUT_LEN", stop_words_list="_STOP_WORDS_IDS")
    + maps("input_map", request_output_len="_REQUEST_OUTPUT_LEN", prompt_table_extra_ids="_EXTRA_IDS")
    + maps("input_map", streaming="stream", beam_width="beam_width", temperature="temperature")
    + maps("input_map", return_log_probs="return_log_probs", lora_weights="lora_weights")
    + maps("output_map", output_ids="_TOKENS_BATCH", sequence_length="_SEQUENCE_LENGTH", cum_log_probs="cum_log_probs")
    + maps("output_map", output_log_probs="output_log_probs", context_logits="context_logits")
    + maps("output_map", batch_index="batch_index", kv_cache_alloc_total_blocks="kv_cache_alloc_total_blocks")
    + '},\n{ model_name: "postprocessing"\nmodel_version: -1\n'
    + maps("input_map", TOKENS_BATCH="_TOKENS_BATCH", SEQUENCE_LENGTH="_SEQUENCE_LENGTH")
    + maps("output_map", OUTPUT="text_output")
    + "}\n]\n}\n",
}

PREPROCESSING = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils

    def tokens(text):
        return [ord(letter) for letter in text.decode()]

    class TritonPythonModel:
        def initialize(self, args):
            model_config = json.loads(args["model_config"])
            values = [f"{key}={value['string_value']}" for key, value in model_config["parameters"].items()]
            pb_utils.Logger.log_info(f"given to preprocessing: {' '.join(sorted(values))}")
            described = pb_utils.get_output_config_by_name(model_config, "INPUT_ID")
            self.dtype = pb_utils.triton_string_to_numpy(described["data_type"])

        def execute(self, requests):
            responses = []
            for request in requests:
                query = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy()
                length = pb_utils.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy()
                stop = pb_utils.get_input_tensor_by_name(request, "STOP_WORDS_DICT")
                words = [] if stop is None else tokens(stop.as_numpy()[0][0])
                ids = np.array([tokens(query[0][0])], self.dtype)
                responses.append(pb_utils.InferenceResponse(output_tensors=[
                    pb_utils.Tensor("INPUT_ID", ids),
                    pb_utils.Tensor("REQUEST_INPUT_LEN", np.array([[ids.shape[1]]], self.dtype)),
                    pb_utils.Tensor("STOP_WORDS_IDS", np.array([[words, [1] * len(words)]], self.dtype)),
                    pb_utils.Tensor("REQUEST_OUTPUT_LEN", length),
                    pb_utils.Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", np.zeros_like(ids, np.uint64)),
                ]))
            return responses
"""
ENGINE = """
    import json, threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    def parameter(model_config, name):
        value = model_config["parameters"][name]["string_value"]
        return None if value == "" or (value.startswith("${") and value.endswith("}")) else value

    def scalar(request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            return None
        array = tensor.as_numpy()
        if array.shape != (1,):
            raise pb_utils.TritonModelException(f"Expected a scalar tensor for tensor {name}, got {array.shape}")
        return array.item(0)

    class Generated:
        def __init__(self, request):
            self.sender = request.get_response_sender()
            self.user = request.request_id()
            self.prompt = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()[0].tolist()
            stops = pb_utils.get_input_tensor_by_name(request, "stop_words_list").as_numpy()[0][0].tolist()
            if scalar(request, "input_lengths") != len(self.prompt):
                raise pb_utils.TritonModelException("the prompt's length is wrong")
            self.wanted = scalar(request, "request_output_len")
            self.streams = scalar(request, "streaming")
            self.ends = stops
            self.logs = scalar(request, "return_log_probs")
            self.tokens, self.sent = [], 0

        def step(self):
            self.tokens.append(self.prompt[len(self.tokens) % len(self.prompt)])
            return len(self.tokens) >= self.wanted or self.tokens[-1] in self.ends

        def response(self):
            tokens = self.tokens[self.sent:]
            self.sent += len(tokens)
            tensors = [
                pb_utils.Tensor("output_ids", np.array([[tokens]], np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], np.int32)),
                pb_utils.Tensor("batch_index", np.array([[0]], np.int32)),
                pb_utils.Tensor("kv_cache_alloc_total_blocks", np.array([[self.sent]], np.int32)),
            ]
            if self.logs:
                tensors.append(pb_utils.Tensor("cum_log_probs", np.array([[-1.0]], np.float32)))
                tensors.append(pb_utils.Tensor("output_log_probs", np.full((1, 1, len(tokens)), -1, np.float32)))
            return pb_utils.InferenceResponse(output_tensors=tensors)

    class TritonPythonModel:
        def initialize(self, args):
            model_config = json.loads(args["model_config"])
            assert parameter(model_config, "decoding_mode") is None
            assert parameter(model_config, "gpt_model_path") == "/opt/engine"
            self.period = int(parameter(model_config, "cancellation_check_period_ms")) / 1000
            assert pb_utils.using_decoupled_model_transaction_policy(model_config)
            family = pb_utils.MetricFamily(
                name="nv_llm_output_tokens", description="Tokens", kind=pb_utils.MetricFamily.HISTOGRAM)
            self.metric = family.Metric(labels={"model": "tensorrt_llm", "version": "1"}, buckets=[1.0, 10.0])
            self.changed = threading.Condition()
            self.running, self.active, self.given_up = True, {}, set()
            self.ended = threading.Event()
            self.threads = [threading.Thread(target=work) for work in (self.awaiter_loop, self.cancellation_loop)]
            for thread in self.threads:
                thread.start()

        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                try:
                    if scalar(request, "stop"):
                        user = request.request_id()
                        with self.changed:
                            self.given_up |= {key for key, each in self.active.items() if each.user == user}
                        empty = pb_utils.Tensor("output_ids", np.zeros((1, 1, 0), np.int32))
                        sender.send(pb_utils.InferenceResponse(output_tensors=[empty]), flags=final)
                        continue
                    generated = Generated(request)
                except Exception as error:
                    text = f"An error occurred when processing the input values, the error was '{error}'"
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)), flags=final)
                    continue
                with self.changed:
                    self.active[id(generated)] = generated
                    self.changed.notify_all()
            return None

        def awaiter_loop(self):
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.active or not self.running)
                    if not self.running:
                        return
                    active, given_up = list(self.active.items()), set(self.given_up)
                for key, generated in active:
                    cancelled = key in given_up
                    final = cancelled or generated.step()
                    if final:
                        pb_utils.Logger.log_info(
                            f"the engine ends '{generated.user}' {'early' if cancelled else 'as planned'}")
                        self.metric.observe(len(generated.tokens))
                        with self.changed:
                            del self.active[key]
                            self.given_up.discard(key)
                    if final or generated.streams:
                        generated.sender.send(
                            generated.response(), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)

        def cancellation_loop(self):
            while not self.ended.wait(self.period):
                with self.changed:
                    self.given_up |= {key for key, each in self.active.items() if each.sender.is_cancelled()}

        def finalize(self):
            with self.changed:
                self.running = False
                self.changed.notify_all()
            self.ended.set()
            for thread in self.threads:
                thread.join()
            pb_utils.Logger.log_info("the engine is shut down")
"""
POSTPROCESSING = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            model_config = json.loads(args["model_config"])
            skip = model_config["parameters"].get("skip_special_tokens", {"string_value": "true"})["string_value"]
            pb_utils.Logger.log_info(f"given to postprocessing: {skip}")
            described = pb_utils.get_output_config_by_name(model_config, "OUTPUT")
            self.dtype = pb_utils.triton_string_to_numpy(described["data_type"])

        def execute(self, requests):
            responses = []
            for request in requests:
                batch = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
                lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
                texts = [
                    ["".join(map(chr, beam[:length])).encode() for beam, length in zip(beams, lengths_of)]
                    for beams, lengths_of in zip(batch, lengths)
                ]
                text = pb_utils.Tensor("OUTPUT", np.array(texts).astype(self.dtype))
                responses.append(pb_utils.InferenceResponse(output_tensors=[text]))
            return responses
"""
BLS = """
    import json, traceback
    import numpy as np
    import triton_python_backend_utils as pb_utils

    TO_PREPROCESSING = {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens", "STOP_WORDS_DICT": "stop_words"}
    TO_ENGINE = {
        "INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths", "STOP_WORDS_IDS": "stop_words_list",
        "REQUEST_OUTPUT_LEN": "request_output_len", "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
    }
    ALONG = {"streaming": "stream", "temperature": "temperature", "return_log_probs": "return_log_probs"}
    TO_CLIENT = ("cum_log_probs", "output_log_probs", "batch_index", "kv_cache_alloc_total_blocks")

    def renamed(names, given):
        # A scalar, whose dim a reshape took away, gets it back for the other model.
        arrays = {name: given[source].as_numpy() for name, source in names.items() if source in given}
        return [pb_utils.Tensor(name, array[None] if array.ndim == 1 else array) for name, array in arrays.items()]

    class TritonPythonModel:
        def initialize(self, args):
            model_config = json.loads(args["model_config"])
            given = model_config["parameters"]
            self.accumulates = given["accumulate_tokens"]["string_value"].lower() in ("true", "yes", "1", "t")
            name = given["tensorrt_llm_model_name"]["string_value"]
            self.engine = "tensorrt_llm" if name == "${tensorrt_llm_model_name}" else name
            self.decoupled = pb_utils.using_decoupled_model_transaction_policy(model_config)
            self.logger = pb_utils.Logger

        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                try:
                    for response in self.decode({tensor.name(): tensor for tensor in request.inputs()}):
                        sender.send(response)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                except Exception:
                    self.logger.log_error(traceback.format_exc())
                    error = pb_utils.TritonError(traceback.format_exc())
                    sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error))
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return None

        def decode(self, given):
            prepared = self.call("preprocessing", renamed(TO_PREPROCESSING, given), list(TO_ENGINE))
            tensors = [pb_utils.Tensor(TO_ENGINE[each.name()], each.as_numpy()) for each in prepared.output_tensors()]
            tensors += renamed(ALONG, given)
            called = pb_utils.InferenceRequest(
                model_name=self.engine, inputs=tensors,
                requested_output_names=["output_ids", "sequence_length", "context_logits", *TO_CLIENT])
            tokens = np.zeros((1, 1, 0), np.int32)
            for response in called.exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                outputs = {tensor.name(): tensor for tensor in response.output_tensors()}
                if not outputs:
                    continue
                new = outputs["output_ids"].as_numpy()
                tokens = np.concatenate((tokens, new), axis=2) if self.accumulates else new
                told = self.call("postprocessing", [
                    pb_utils.Tensor("TOKENS_BATCH", tokens),
                    pb_utils.Tensor("SEQUENCE_LENGTH", np.array([[tokens.shape[2]]], np.int32)),
                ], ["OUTPUT"])
                text = pb_utils.get_output_tensor_by_name(told, "OUTPUT")
                yield pb_utils.InferenceResponse(output_tensors=[
                    pb_utils.Tensor("text_output", text.as_numpy()),
                    *renamed({name: name for name in TO_CLIENT}, outputs),
                ])

        def call(self, model, tensors, outputs):
            response = pb_utils.InferenceRequest(
                model_name=model, inputs=tensors, requested_output_names=outputs).exec(decoupled=False)
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            return response

        def finalize(self):
            print("Cleaning up...")
"""
PROGRAMS = {
    "preprocessing": PREPROCESSING,
    "tensorrt_llm": ENGINE,
    "postprocessing": POSTPROCESSING,
    "tensorrt_llm_bls": BLS,
}


def write_repository(root: Path, **values: str) -> Path:
    """The five models, filled with FILLED and these values."""
    for name, template in TEMPLATES.items():
        version = root / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(fill(template, {**FILLED, **values}))
        if name in PROGRAMS:
            (version / "model.py").write_text(textwrap.dedent(PROGRAMS[name]))
    return root


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("inflight_batcher_llm"))


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[doors.Process]:
    with doors.running_server("native", repository) as process:
        yield process


class Stream:
    """A stream of tritonclient, and what came on it."""

    def __init__(self, address: str) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self.client = triton.InferenceServerClient(address)
        self.client.start_stream(lambda result, error: self.answers.put(error or result))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream()
        self.client.close()

    def ask(self, model: str, text: str, most: int, *more: triton.InferInput, **options: Any) -> None:
        inputs = [tensor("text_input", np.array([[text.encode()]], object))]
        inputs += [tensor("max_tokens", np.array([[most]], np.int32)), *more]
        self.client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def next(self) -> triton.InferResult:
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def all(self) -> list[triton.InferResult]:
        """The responses up to the final one. An empty final one is left out."""
        found = []
        while True:
            answer = self.next()
            if answer.get_response().outputs:
                found.append(answer)
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return found


STREAM = tensor("stream", np.array([[True]]))


def texts(answers: list[triton.InferResult]) -> list[str]:
    return [answer.as_numpy("text_output").item().decode() for answer in answers]


def test_the_check_finds_no_error(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(repository), "--format", "json"]) == 0
    models = {model["model"]: model for model in json.loads(capsys.readouterr().out)}
    assert sorted(models) == sorted(TEMPLATES)
    assert not any(model["problems"] for model in models.values()), models
    warnings = {name: "\n".join(each["text"] for each in model["warnings"]) for name, model in models.items()}
    assert "${skip_special_tokens} is left as it is" in warnings["postprocessing"]
    assert "kv_cache_alloc_total_blocks" in warnings["ensemble"]


def test_what_nobody_filled_arrives_as_it_is_written(server: doors.Process) -> None:
    server.says("given to postprocessing: ${skip_special_tokens}")
    server.says(
        "given to preprocessing: add_special_tokens=${add_special_tokens} gpt_model_path=/opt/engine "
        "tokenizer_dir=/opt/tokenizer visual_model_path=${visual_model_path}"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [({}, (0, False, False)), ({"sequence_id": 7, "sequence_start": True}, (7, True, False))],
    ids=["no sequence", "a sequence"],
)
def test_the_ensemble_streams_and_names_the_sequence(server: doors.Process, options: Any, named: Any) -> None:
    with Stream(server.address) as stream:
        stream.ask("ensemble", "abc", 5, STREAM, request_id="me", **options)
        answers = stream.all()
    assert texts(answers) == ["a", "b", "c", "a", "b"]
    blocks = [answer.as_numpy("kv_cache_alloc_total_blocks").tolist() for answer in answers]
    assert blocks == [[[1]], [[2]], [[3]], [[4]], [[5]]]
    for answer in answers:
        response = answer.get_response()
        assert response.id == "me"
        found = response.parameters
        names = ("sequence_id", "sequence_start", "sequence_end")
        assert (found[names[0]].int64_param, found[names[1]].bool_param, found[names[2]].bool_param) == named
        given = {output.name for output in response.outputs}
        assert given == {"text_output", "batch_index", "kv_cache_alloc_total_blocks"}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_whole_answers(server: doors.Process, model: str) -> None:
    """Without `stream` there is one response; optional inputs reach the engine."""
    more = [
        tensor("return_log_probs", np.array([[True]])),
        tensor("temperature", np.array([[0.5]], np.float32)),
        tensor("stop_words", np.array([[b"c"]], object)),
    ]
    with Stream(server.address) as stream:
        stream.ask(model, "abc", 100, *more)
        (answer,) = stream.all()
    assert texts([answer]) == ["abc"]
    assert answer.as_numpy("output_log_probs").tolist() == [[[-1, -1, -1]]]


def test_the_bls_model_streams(server: doors.Process) -> None:
    with Stream(server.address) as stream:
        stream.ask("tensorrt_llm_bls", "xyz", 4, STREAM)
        answers = stream.all()
    assert texts(answers) == ["x", "y", "z", "x"]
    assert [answer.as_numpy("kv_cache_alloc_total_blocks").item() for answer in answers] == [1, 2, 3, 4]


def test_many_at_once(server: doors.Process) -> None:
    """The engine interleaves its requests; each client gets its own, in order."""
    with Stream(server.address) as stream:
        for number in range(6):
            model = ("ensemble", "tensorrt_llm_bls")[number % 2]
            stream.ask(model, chr(ord("A") + number), 20, STREAM, request_id=str(number))
        found: dict[str, list[str]] = {}
        ended = 0
        while ended < 6:
            answer = stream.next()
            if answer.get_response().outputs:
                found.setdefault(answer.get_response().id, []).extend(texts([answer]))
            ended += answer.get_response().parameters["triton_final_response"].bool_param
    assert found == {str(number): [chr(ord("A") + number)] * 20 for number in range(6)}


def test_the_engine_refuses_a_request_through_its_sender(server: doors.Process) -> None:
    with Stream(server.address) as stream:
        inputs = [
            tensor("input_ids", np.array([[1, 2]], np.int32)),
            tensor("input_lengths", np.array([[3]], np.int32)),
            tensor("request_output_len", np.array([[1]], np.int32)),
            tensor("stop_words_list", np.zeros((1, 2, 0), np.int32)),
        ]
        stream.client.async_stream_infer("tensorrt_llm", inputs)
        with pytest.raises(InferenceServerException, match=r"the input values.*the prompt's length is wrong"):
            stream.next()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"])
def test_a_cancelled_client_ends_the_request_of_the_engine(server: doors.Process, model: str) -> None:
    stream = Stream(server.address)
    name = f"cancelled in {model}"
    if model != "tensorrt_llm":
        stream.ask(model, "abc", 2**30, STREAM, request_id=name)
    else:
        inputs = [
            tensor("input_ids", np.array([[1, 2]], np.int32)),
            tensor("input_lengths", np.array([[2]], np.int32)),
            tensor("request_output_len", np.array([[2**30]], np.int32)),
            tensor("stop_words_list", np.zeros((1, 2, 0), np.int32)),
            tensor("streaming", np.array([[True]])),
        ]
        stream.client.async_stream_infer(model, inputs, request_id=name)
    for _ in range(3):
        stream.next()
    stream.client.stop_stream(cancel_requests=True)
    server.says(f"the engine ends '{name}' early")
    stream.client.close()
    with Stream(server.address) as other:
        other.ask("ensemble", "q", 2, STREAM)
        assert texts(other.all()) == ["q", "q"]


def test_a_stop_request_ends_the_one_of_its_id(server: doors.Process) -> None:
    with Stream(server.address) as stream, Stream(server.address) as other:
        stream.ask("ensemble", "abc", 2**30, STREAM, request_id="to stop")
        first = stream.next()
        inputs = [
            tensor("input_lengths", np.array([[0]], np.int32)),
            tensor("request_output_len", np.array([[0]], np.int32)),
            tensor("stop", np.array([[True]])),
        ]
        other.client.async_stream_infer("tensorrt_llm", inputs, request_id="to stop")
        assert other.next().as_numpy("output_ids").shape == (1, 1, 0)
        said = "".join(texts([first, *stream.all()]))
        assert said.startswith("a")
        assert set(said) <= set("abc")
    server.says("the engine ends 'to stop' early")


def test_tokens_are_accumulated_if_the_parameter_is_filled(tmp_path: Path) -> None:
    write_repository(tmp_path, accumulate_tokens="true", tensorrt_llm_model_name="tensorrt_llm")
    with doors.running_server("native", tmp_path) as process:
        with Stream(process.address) as stream:
            stream.ask("tensorrt_llm_bls", "xyz", 3, STREAM)
            assert texts(stream.all()) == ["x", "xy", "xyz"]
        process.terminate()
        process.says("the engine is shut down")
