"""Python models in sequences: controls and state as inputs, state from outputs, requests that are rescheduled."""

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.backends.python.served import add_model, serving
from tests.conformance import doors
from tests.engine.serving import infer, infer_all, request

CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""

SEQUENCES = """
sequence_batching {
  %s
  max_sequence_idle_microseconds: 60000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state { input_name: "sum" output_name: "sum_out" data_type: TYPE_INT64 dims: [ 1 ] }
}
"""

ACCUMULATE = """
import numpy as np
import triton_python_backend_utils as pb_utils

def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            total = value(request, "sum") + value(request, "x")
            told = [value(request, "START").item(), int(value(request, "READY").item()),
                    len(value(request, "CORRID").item())]
            y = np.array([[*told, total.item()]], np.int64)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("y", y), pb_utils.Tensor("sum_out", total)]))
        return responses
"""

COUNT_DOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.rounds = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy().item()
            done = self.rounds.pop(request.correlation_id(), 0) + 1
            if done < x:
                self.rounds[request.correlation_id()] = done
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                y = np.array([[done, len(self.rounds)]], np.int64)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return responses
"""

WRITES_TO_INPUTS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        for tensor in tensors:
            tensor += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]) for tensor in tensors]
"""


pytestmark = pytest.mark.usefixtures("native_counters")


def step(x, name="", *, start=False, end=False):
    message = request(x=np.array([[x]]))
    if name:
        message.parameters["sequence_id"].string_param = name
    message.parameters["sequence_start"].bool_param = start
    message.parameters["sequence_end"].bool_param = end
    return message


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 8 }"])
async def test_controls_and_state(tmp_path, strategy):
    add_model(tmp_path, "m", ACCUMULATE, CONFIG + SEQUENCES % strategy)
    async with serving(tmp_path) as engine:
        for turn in range(4):
            answers = await infer_all(engine, *(step(n, "s" * n, start=turn == 0) for n in (1, 2, 3)))
            expected = [[int(turn == 0), 1, n, n * (turn + 1)] for n in (1, 2, 3)]
            assert [answer.array()[0].tolist() for answer in answers] == expected
        # the other rows are idle now, and a subset of outputs is asked for
        message = step(5, "sss")
        message.outputs.add(name="y")
        assert (await infer(engine, message)).array()[0].tolist() == [0, 1, 3, 17]
        assert (await infer(engine, step(1, "sss", end=True))).array()[0].tolist() == [0, 1, 3, 18]


async def test_rescheduled_requests_run_again(tmp_path):
    """Continuous batching: each request runs as many rounds as it says, beside the others."""
    sequences = "sequence_batching { oldest { max_candidate_sequences: 4 } iterative_sequence: true }"
    add_model(tmp_path, "m", COUNT_DOWN, CONFIG + sequences)
    async with serving(tmp_path) as engine:
        answers = await infer_all(engine, *(step(n) for n in (3, 1, 5, 2, 4)))
        assert [answer.array()[0, 0] for answer in answers] == [3, 1, 5, 2, 4]
        assert engine.model("m").lane.statistics()["inference_count"] == 5


async def test_only_iterative_requests_are_rescheduled(tmp_path):
    sequences = "sequence_batching { oldest { } }"
    add_model(tmp_path, "m", COUNT_DOWN, CONFIG + sequences)
    async with serving(tmp_path) as engine:
        answer = await infer(engine, step(2, "s", start=True))
    assert "was released to be rescheduled, which needs 'iterative_sequence'" in answer.text


def test_a_model_that_writes_to_the_inputs_of_idle_rows(tmp_path):
    """An idle row has the tensors of another row, which the model does not change by writing to it."""
    add_model(tmp_path, "m", WRITES_TO_INPUTS, CONFIG + SEQUENCES % "direct { }")
    with doors.running_server("native", tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        for sequence in (1, 2, 2, 2):  # the first one keeps the row before the second one
            x = triton.InferInput("x", [1, 100_000], "INT64")
            x.set_data_from_numpy(np.full((1, 100_000), sequence))
            answer = client.infer("m", [x], sequence_id=str(sequence), sequence_start=True).as_numpy("y")
            assert np.unique(answer).tolist() == [sequence + 1]


ANSWERS_FIRST = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    rounds = 0

    def execute(self, requests):
        [request] = requests
        self.rounds += 1
        y = pb_utils.Tensor("y", np.array([[self.rounds]], np.int64))
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([y], parameters={"round": self.rounds}))
        if self.rounds < 4:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return [None]
"""


async def test_a_response_that_each_round_replaces_leaves_no_memory(tmp_path):
    sequences = "sequence_batching { oldest { } iterative_sequence: true }"
    add_model(tmp_path, "m", ANSWERS_FIRST, CONFIG + sequences)
    async with serving(tmp_path) as engine:
        assert (await infer(engine, step(1))).array().tolist() == [[4]]
