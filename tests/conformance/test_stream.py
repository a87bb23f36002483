"""ModelStreamInfer through raw stubs."""

from __future__ import annotations

import queue
import threading

import grpc
import numpy as np
import pytest

from tests.conformance import doors
from tests.conformance.client import Control, Stub, floats, output, request
from tests.waiting import PATIENCE, at_rest, wait_until

CLOSE_ON_ERROR = (("triton_grpc_error", "true"),)


class Requests:
    """Requests of a stream, sent one by one."""

    def __init__(self):
        self._queue = queue.SimpleQueue()

    def send(self, message):
        self._queue.put(message)

    def close(self):
        self._queue.put(None)

    def __iter__(self):
        return iter(self._queue.get, None)


def numbered(model, numbers):
    return (request(model, floats(number), id=str(number)) for number in numbers)


def test_responses_in_order(stub):
    responses = list(stub.ModelStreamInfer(numbered("simple", range(500))))
    assert [response.infer_response.id for response in responses] == [str(number) for number in range(500)]
    assert [output(response.infer_response).item() for response in responses] == list(range(500))
    assert {response.error_message for response in responses} == {""}


def test_every_response_is_a_final_one(stub):
    (response,) = stub.ModelStreamInfer(numbered("simple", [1]))
    assert response.infer_response.parameters["triton_final_response"].bool_param


def test_a_slow_request_holds_up_the_ones_behind_it(stub):
    requests = [request("slow", floats(1), id="slow"), request("simple", floats(2), id="fast")]
    assert [each.infer_response.id for each in stub.ModelStreamInfer(iter(requests))] == ["slow", "fast"]


def test_a_stream_without_requests_ends_well(stub):
    call = stub.ModelStreamInfer(iter(()))
    assert list(call) == []
    assert call.code() is grpc.StatusCode.OK


def test_models_and_versions_in_one_stream(stub):
    requests = [
        request("versions", floats(1, 2, 3, 4), version="1"),
        request("whole", np.zeros((2, 1), np.float32)),
        request("versions", floats(1, 2, 3, 4)),
    ]
    responses = [each.infer_response for each in stub.ModelStreamInfer(iter(requests))]
    assert [(each.model_name, each.model_version) for each in responses] == [
        ("versions", "1"),
        ("whole", "1"),
        ("versions", "3"),
    ]


def test_answers_come_before_the_client_is_done(stub):
    requests = Requests()
    responses = stub.ModelStreamInfer(iter(requests))
    for number in range(5):
        requests.send(request("simple", floats(number), id=str(number)))
        assert next(responses).infer_response.id == str(number)
    requests.close()
    assert list(responses) == []


def test_half_close_waits_for_what_is_in_flight(stub):
    call = stub.ModelStreamInfer(numbered("slow", [1, 2]))
    assert [each.infer_response.id for each in call] == ["1", "2"]
    assert call.code() is grpc.StatusCode.OK


# ---- errors ----


def test_errors_travel_inside_and_the_stream_goes_on(stub):
    requests = [
        request("simple", floats(1), id="good"),
        request("nothing", floats(1), id="bad"),
        request("simple", floats(1).astype(np.int32), id="worse"),
        request("simple", floats(2), id="good again"),
    ]
    responses = list(stub.ModelStreamInfer(iter(requests)))
    assert [each.infer_response.id for each in responses] == ["good", "bad", "worse", "good again"]
    assert responses[1].error_message == "Request for unknown model: 'nothing' is not found"
    assert "data-type is 'INT32'" in responses[2].error_message
    assert not responses[1].infer_response.outputs
    assert output(responses[3].infer_response).item() == 2
    assert [each.infer_response.model_name for each in responses] == ["simple", "", "simple", "simple"]
    assert all(each.infer_response.parameters["triton_final_response"].bool_param for each in responses)


def test_first_error_ends_the_stream_with_its_status_if_asked(stub):
    requests = Requests()
    for message in (request("simple", floats(1), id="good"), request("nothing", floats(1), id="bad")):
        requests.send(message)
    call = stub.ModelStreamInfer(iter(requests), metadata=CLOSE_ON_ERROR)
    assert next(call).infer_response.id == "good"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    requests.close()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "Request for unknown model: 'nothing' is not found"


def test_the_error_cancels_the_other_requests_of_the_stream(stub, control):
    requests = Requests()
    for message in (request("nothing", floats(1)), *(request("hang", floats(1)) for _ in range(10))):
        requests.send(message)
    call = stub.ModelStreamInfer(iter(requests), metadata=CLOSE_ON_ERROR)
    with pytest.raises(grpc.RpcError):
        next(call)
    wait_until(lambda: control.live_requests() == 0)
    requests.close()


@pytest.mark.parametrize("value", ["false", "0", ""])
def test_other_values_do_not_ask_for_it(stub, value):
    call = stub.ModelStreamInfer(iter([request("nothing", floats(1))]), metadata=(("triton_grpc_error", value),))
    assert [bool(each.error_message) for each in call] == [True]


# ---- the end of a stream ----


def test_cancellation_cancels_all_its_requests(stub, control):
    requests = Requests()
    call = stub.ModelStreamInfer(iter(requests))
    for _ in range(10):
        requests.send(request("hang", floats(1)))
    wait_until(lambda: control.live_requests() == 10)
    call.cancel()
    wait_until(lambda: control.live_requests() == 0)
    requests.close()


def test_deadline_of_a_stream(stub, control):
    requests = Requests()
    for _ in range(10):
        requests.send(request("hang", floats(1)))
    call = stub.ModelStreamInfer(iter(requests), timeout=0.5)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    requests.close()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: control.live_requests() == 0)


# ---- the window ----


def test_requests_are_read_ahead_up_to_the_window(door):
    if door == "target":
        pytest.skip("needs a server with a small window")
    with doors.running_door(door, "--stream-window", "7") as process, grpc.insecure_channel(process.address) as channel:
        control = Control(channel)
        sent = threading.Event()

        def requests():
            yield from numbered("hang", range(100))
            sent.set()  # the transport has taken the last one

        call = Stub(channel).ModelStreamInfer(requests())
        assert sent.wait(PATIENCE)
        wait_until(lambda: control.live_requests() == 7)
        assert at_rest(control.live_requests) == 7
        call.cancel()


def test_a_client_that_does_not_read_stops_the_server_from_reading(server, control):
    """While no response is read, the server takes only what windows and flow control allow of 1 GB of requests."""
    taken = 0

    def requests():
        nonlocal taken
        array = np.zeros((1, 250_000), np.float32)
        for _ in range(1000):
            taken += 1
            yield request("simple", array)

    with grpc.insecure_channel(server, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = Stub(channel).ModelStreamInfer(requests())
        first = next(call)
        assert not first.error_message
        wait_until(lambda: taken > 1)
        assert at_rest(lambda: (control.live_requests(), taken)[1]) < 400
        call.cancel()
