"""What clients make a server hold: bounded, at the cost of who holds most and moves least, and of nobody else."""

from __future__ import annotations

import gzip
import os

import grpc
import numpy as np
import pytest

from tests.conformance import doors, raw
from tests.conformance.client import Stub, output, request
from tests.framing import framed

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIMIT = 24 * MIB

MODEL = """
backend: "identity"
max_batch_size: 0
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
{extra}
"""
WAITING = MODEL.replace("identity", "python").format(extra="")
WAITING_MODEL = """
from pathlib import Path

class TritonPythonModel:
    def execute(self, requests):
        Path(__file__).with_name("gate").read_bytes()  # a FIFO: it waits until somebody writes
        return [None] * len(requests)
"""
SENDER = MODEL.replace("identity", "python").format(extra="model_transaction_policy { decoupled: true }")
SENDER_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        # one at a time, for as long as anybody waits for it
        for request in requests:
            sender = request.get_response_sender()
            count = int(request.inputs()[0].as_numpy()[0])
            while count and not sender.is_cancelled():
                count -= 1
                tensor = pb_utils.Tensor("OUTPUT0", np.zeros(16384, np.float32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("held")
    for name, config in {"quick": MODEL.format(extra=""), "waiting": WAITING, "sender": SENDER}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "sender" / "1" / "model.py").write_text(SENDER_MODEL)
    (root / "waiting" / "1" / "model.py").write_text(WAITING_MODEL)
    os.mkfifo(root / "waiting" / "1" / "gate")
    return root


@pytest.fixture(scope="module")
def server(repository):
    options = (f"--max-held-bytes={LIMIT}", "--grpc-send-timeout=1000")
    with doors.running_server("native", repository, *options) as process:
        yield process.address


def open_gate(repository):
    """Let the model "waiting" go on, and wait no more."""
    gate = repository / "waiting" / "1" / "gate"
    held = os.open(gate, os.O_RDWR)
    (gate.parent / "opened").touch()
    (gate.parent / "opened").replace(gate)
    os.close(held)  # it reads the end


def vector(*numbers):
    return np.array(numbers, np.float32)


def ask(address, *numbers, timeout=60):
    with grpc.insecure_channel(address) as channel:
        return output(Stub(channel).ModelInfer(request("quick", vector(*numbers)), timeout=timeout)).tolist()


def unread(address, size=3 * MIB):
    """A client with an answer that it does not read."""
    client = raw.Client(address, acknowledge_data=False)
    stream = client.headers(INFER)
    message = framed(request("quick", np.zeros(size // 4, np.float32)).SerializeToString())
    for at in range(0, len(message), 16384):
        client.receive_until(lambda: client.h2.local_flow_control_window(stream) >= 16384)
        client.data(stream, message[at : at + 16384], end=at + 16384 >= len(message))
    client.receive_until(lambda: client.answers[stream].headers)
    return client, stream


def test_a_new_client_is_served_while_others_do_not_read(server):
    """There are more of their answers than the server may hold, and it does not wait for them."""
    clients = [unread(server) for _ in range(10)]
    for number in range(10):
        assert ask(server, number) == [number]
    for client, _ in clients:
        client.socket.close()


def test_an_answer_that_is_not_read_in_time_is_given_up(server):
    client, stream = unread(server)
    assert client.answer(stream).reset == 11, "ENHANCE_YOUR_CALM, which gRPC calls RESOURCE_EXHAUSTED"
    client.socket.close()


def test_queued_requests_are_bounded_by_what_they_inflate_to(server, repository):
    """None is executed before the others are refused: all that fit in the limit stay, however slow the client is."""
    message = gzip.compress(request("waiting", np.zeros(MIB, np.float32)).SerializeToString())
    try:
        with raw.Client(server) as client:
            streams = [client.headers(INFER, grpc_encoding="gzip") for _ in range(20)]
            for stream in streams:
                client.receive_until(lambda each=stream: client.h2.local_flow_control_window(each) > len(message) + 5)
                client.data(stream, framed(message, compressed=1), end=True)
            client.receive_until(lambda: sum(client.answers[each].ended for each in streams) >= 20 - LIMIT // (4 * MIB))
            answers = [client.answers[each] for each in streams if client.answers[each].ended]
            assert {answer.status for answer in answers} == {8}
            assert all("more bytes than its limit" in answer.details for answer in answers)
            assert ask(server, 1) == [1]
    finally:
        open_gate(repository)


def test_who_does_not_read_a_stream_does_not_keep_its_model(server):
    """The stream is ended, the model is told, and answers the next one."""
    client = raw.Client(server, acknowledge_data=False)
    stream = client.headers(STREAM)
    client.data(stream, framed(request("sender", vector(1e6)).SerializeToString()))
    with grpc.insecure_channel(server) as channel:
        responses = list(Stub(channel).ModelStreamInfer(iter([request("sender", vector(1))]), timeout=60))
    assert len(responses) == 1
    assert client.answer(stream).reset == 11
    client.socket.close()
