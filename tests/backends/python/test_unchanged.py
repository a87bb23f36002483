"""What `model.py` files written for Triton rely on, beyond its documentation: behind a real server."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.backends.python.served import wait_for
from tests.backends.python.test_tritonclient import config
from tests.conformance import doors

HEAD = """
import asyncio, multiprocessing, os, resource, signal, subprocess, sys, time
import numpy as np, triton_python_backend_utils as pb_utils
def out(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", value)])
def double(value):
    return value * 2
def call(number):
    pb_utils.Logger.log_info(f"fork {number}")
    def request(model):
        x = pb_utils.Tensor("x", np.array([number]))
        return pb_utils.InferenceRequest(model_name=model, inputs=[x], requested_output_names=["y"])
    numbers = [response.output_tensors() for response in request("counts").exec(decoupled=True)]
    assert len(numbers) == number + 1 and pb_utils.is_model_ready("counts")
    refused = "Model nobody - Error when running inference: Request for unknown model: 'nobody' is not found"
    assert refused in request("nobody").exec().error().message()
    return int(request("doubles").exec().output_tensors()[0].as_numpy()[0])
class TritonPythonModel:
"""
MODELS = {
    # name: inputs, outputs, methods
    "no_inputs": ({}, {"y": "INT64"}, "def execute(self, requests): return [out(np.array([7])) for _ in requests]"),
    "no_outputs": (
        {"x": "INT64"},
        {},
        "def execute(self, requests): return [pb_utils.InferenceResponse([]) for _ in requests]",
    ),
    "arguments": (
        {},
        {"y": "STRING"},
        "def execute(self, requests): return [out(np.array(sys.argv, object)) for _ in requests]",
    ),
    # The public example of BLS names the model by an element of a BYTES tensor.
    "bytes_names": (
        {},
        {"y": "INT64"},
        """
def execute(self, requests):
    called = pb_utils.InferenceRequest(
        request_id=b"1", model_name=np.array([b"no_inputs"], object)[0], inputs=[], requested_output_names=[b"y"])
    value = pb_utils.get_output_tensor_by_name(called.exec(), "y").as_numpy()
    ready = pb_utils.is_model_ready(b"no_inputs")
    return [pb_utils.InferenceResponse([pb_utils.Tensor(np.array(["y"])[0], value + ready)]) for _ in requests]
""",
    ),
    # What `multiprocessing` does on Linux by itself, and as many libraries ask it to.
    **{
        method: (
            {"x": "INT64"},
            {"y": "INT64"},
            f"""
def execute(self, requests):
    numbers = requests[0].inputs()[0].as_numpy().tolist()
    with multiprocessing.get_context("{method}").Pool({size}) as pool:
        return [out(np.array(pool.map({work}, numbers, chunksize=1)))]
""",
        )
        for method, work, size in (("fork", "call", 3), ("spawn", "double", 1))
    },
    "ends": (
        {"x": "INT64"},
        {"y": "INT64"},
        """
def execute(self, requests):
    codes = []
    for number in requests[0].inputs()[0].as_numpy().tolist():
        for more in ({}, {"preexec_fn": lambda: None}):
            program = subprocess.Popen(["sleep", "3600"], **more)
            program.send_signal(number)
            codes.append(program.wait())
        reads, writes = os.pipe()
        nothing, _kept = os.pipe()
        def run():
            os.write(writes, b"1")
            os.read(nothing, 1)
        fork = multiprocessing.get_context("fork").Process(target=run)
        fork.start()
        if number == signal.SIGINT:  # which Python forgets where it comes within the fork
            os.read(reads, 1)
        os.kill(fork.pid, number)
        fork.join()
        codes.append(fork.exitcode)
    return [out(np.array(codes))]
""",
    ),
    # Its fork takes a signal only when its sender is gone.
    "spared": (
        {},
        {"y": "INT64"},
        """
def execute(self, requests):
    folder = requests[0].request_id()
    def run():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with open(f"{folder}/writing", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/writing", f"{folder}/pid")
        while not os.path.exists(f"{folder}/sent"):
            time.sleep(0.001)
        assert signal.SIGTERM in signal.sigpending()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os._exit(5)
    fork = multiprocessing.get_context("fork").Process(target=run)
    fork.start()
    fork.join()
    return [out(np.array([fork.exitcode]))]
""",
    ),
    "forks": (
        {},
        {"y": "INT64"},
        """
def execute(self, requests):
    def code(ask):
        fork = os.fork()
        if fork == 0:
            try:
                os._exit(ask())
            except pb_utils.TritonModelException as error:
                os._exit(7 if "had no file descriptors left" in str(error) else 1)
        return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
    codes = [code(lambda: pb_utils.is_model_ready("doubles"))]
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    codes.append(code(lambda: 2 + pb_utils.is_model_ready("doubles")))
    codes.append(code(lambda: code(lambda: 4 + pb_utils.is_model_ready("doubles"))))
    return [out(np.array(codes)) for _ in requests]
""",
    ),
    "doubles": (
        {"x": "INT64"},
        {"y": "INT64"},
        "def execute(self, requests): return [out(double(r.inputs()[0].as_numpy())) for r in requests]",
    ),
    "counts": (
        {"x": "INT64"},
        {"y": "INT64"},
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    for number in range(requests[0].inputs()[0].as_numpy()[0]):
        sender.send(out(np.array([number])))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    ),
    # Two requests meet in a model that answers none before it has both.
    "meets": (
        {},
        {"y": "INT64"},
        """
waiting = []
def execute(self, requests):
    self.waiting += [request.get_response_sender() for request in requests]
    if len(self.waiting) == 2:
        for number, sender in enumerate(self.waiting):
            sender.send(out(np.array([number])))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.waiting.clear()
""",
    ),
    "meet": (
        {},
        {"y": "INT64"},
        """
async def execute(self, requests):
    async def one():
        call = pb_utils.InferenceRequest(model_name="meets", inputs=[], requested_output_names=["y"])
        responses = await call.async_exec(decoupled=True)
        return [int(r.output_tensors()[0].as_numpy()[0]) for r in responses if r.output_tensors()]
    found = await asyncio.gather(one(), one())
    return [out(np.array(sorted(sum(found, [])))) for _ in requests]
""",
    ),
    "odd": (
        {"x": "INT64"},
        {"y": "INT64"},
        """
def execute(self, requests):
    x = requests[0].inputs()[0].as_numpy()
    if x[0] == 0:
        raise ValueError("\\0 and \\ud83d and ü")
    if x[0] == 1:
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])]
    return [out(x.reshape((1,) * x[0]))]
""",
    ),
    "bits": (
        {"x": "BF16"},
        {"y": "BF16"},
        "def execute(self, requests): return [out(r.inputs()[0].as_numpy().view(np.uint16)) for r in requests]",
    ),
    "without_numpy": (
        {"x": "INT64"},
        {"y": "INT64"},
        """
def initialize(self, args):
    sys.modules["numpy"] = None  # as if it was not installed
def execute(self, requests):
    return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no array")) for _ in requests]
""",
    ),
    "other_datatype": (
        {"x": "INT64"},
        {"y": "FP32"},
        "def execute(self, requests): return [out(r.inputs()[0].as_numpy() / 2) for r in requests]",
    ),
}

DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[doors.Process]:
    root = tmp_path_factory.mktemp("models")
    for name, (inputs, outputs, methods) in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(HEAD + textwrap.indent(methods, "    "))
        (root / name / "config.pbtxt").write_text(
            config(name, inputs, outputs, more=DECOUPLED if name in ("counts", "meets") else "")
        )
    with doors.running_server("native", root) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: doors.Process) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def ask(client: triton.InferenceServerClient, model: str, *values: int, **more: Any) -> triton.InferResult:
    tensor = triton.InferInput("x", [len(values)], "INT64").set_data_from_numpy(np.array(values, np.int64))
    return client.infer(model, [tensor] if values else [], **more)


def test_a_model_may_have_no_inputs(client: triton.InferenceServerClient) -> None:
    assert ask(client, "no_inputs").as_numpy("y").tolist() == [7]


def test_a_model_may_have_no_outputs(client: triton.InferenceServerClient) -> None:
    assert ask(client, "no_outputs", 1).get_response().outputs == []


def test_libraries_that_read_the_command_line_find_none(client: triton.InferenceServerClient) -> None:
    assert ask(client, "arguments").as_numpy("y").tolist() == [b""]


def test_names_may_be_bytes(client: triton.InferenceServerClient) -> None:
    assert ask(client, "bytes_names").as_numpy("y").tolist() == [8]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_models_start_processes(client: triton.InferenceServerClient, method: str) -> None:
    numbers = list(range(6))
    assert ask(client, method, *numbers, client_timeout=60).as_numpy("y").tolist() == [2 * n for n in numbers]


def test_what_a_model_starts_obeys_signals(client: triton.InferenceServerClient) -> None:
    """A worker itself ignores them; that must not be handed on, or whoever ends a process waits for ever."""
    codes = ask(client, "ends", signal.SIGTERM, signal.SIGINT, client_timeout=60).as_numpy("y").tolist()
    assert codes == [-signal.SIGTERM] * 3 + [-signal.SIGINT] * 2 + [1]  # a fork raises KeyboardInterrupt


def test_a_signal_from_outside_is_one_also_when_its_sender_has_ended(server: doors.Process, tmp_path: Path) -> None:
    """A shell that sends it has ended before the process gets the signal: that must not end what helps a model."""
    with triton.InferenceServerClient(server.address) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.infer, "spared", [], request_id=str(tmp_path), client_timeout=60)
        wait_for(tmp_path / "pid")
        subprocess.run(["sh", "-c", f"kill -TERM {(tmp_path / 'pid').read_text()}"], check=True)
        (tmp_path / "sent").touch()
        assert asked.result(60).as_numpy("y").tolist() == [5]


def test_forks_ask_through_the_process_that_has_made_them(client: triton.InferenceServerClient) -> None:
    """Forks, and forks of forks, ask the server. One made while the worker has no descriptors left gets an error."""
    assert ask(client, "forks", client_timeout=60).as_numpy("y").tolist() == [7, 3, 5]


def test_a_coroutine_that_awaits_a_decoupled_call_lets_others_run(client: triton.InferenceServerClient) -> None:
    assert ask(client, "meet", client_timeout=30).as_numpy("y").tolist() == [0, 1]


def test_the_bits_of_bf16_are_taken_for_it(client: triton.InferenceServerClient) -> None:
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    tensor = triton.InferInput("x", [2], "BF16").set_data_from_numpy(array)
    answer = client.infer("bits", [tensor]).get_response()
    assert answer.outputs[0].datatype == "BF16"
    assert answer.raw_output_contents[0] == array.tobytes()


def test_what_cannot_be_said_in_a_response_fails_that_request_alone(client: triton.InferenceServerClient) -> None:
    with pytest.raises(triton.InferenceServerException, match=r"ValueError: \\0 and \? and ü\n\nAt:\n"):
        ask(client, "odd", 0)
    for rank in (17, 40):
        with pytest.raises(triton.InferenceServerException, match=f"output 'y' has {rank} dimensions, at most 16"):
            ask(client, "odd", rank)
    assert ask(client, "odd", 16).as_numpy("y").shape == (1,) * 16


def test_large_inputs_need_numpy(client: triton.InferenceServerClient) -> None:
    with pytest.raises(triton.InferenceServerException, match="inputs of this size need numpy in the environment"):
        ask(client, "without_numpy", *range(10_000))
    with pytest.raises(triton.InferenceServerException, match="no array"):
        ask(client, "without_numpy", 1)


def test_an_output_under_a_wrong_name_is_told_in_the_log(
    server: doors.Process, client: triton.InferenceServerClient
) -> None:
    assert ask(client, "odd", 1).get_response().outputs == []
    assert server.says("output 'Y' is left out: the configuration has only ['y']")


def test_the_datatype_that_the_model_gives_is_the_one_that_is_sent(client: triton.InferenceServerClient) -> None:
    answer = ask(client, "other_datatype", 3).as_numpy("y")
    assert answer.dtype == np.float64
    assert answer.tolist() == [1.5]
    labels = [triton.InferRequestedOutput("y", class_count=1)]
    with pytest.raises(triton.InferenceServerException, match="unexpected datatype FP64 for output tensor 'y'"):
        ask(client, "other_datatype", 3, outputs=labels)
