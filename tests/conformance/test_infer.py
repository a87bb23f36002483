"""ModelInfer through raw stubs: datatypes, shapes, outputs, deadlines, cancellation, sizes."""

from __future__ import annotations

import struct

import grpc
import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors, models
from tests.conformance.client import DATATYPES, Stub, floats, output, request
from tests.threads import in_threads
from tests.waiting import wait_until

TYPED = {
    "BOOL": ("bool_contents", [True, False, True]),
    "UINT8": ("uint_contents", [0, 255, 7]),
    "UINT16": ("uint_contents", [0, 65535, 7]),
    "UINT32": ("uint_contents", [0, 2**32 - 1, 7]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1, 7]),
    "INT8": ("int_contents", [-128, 127, -1]),
    "INT16": ("int_contents", [-32768, 32767, -1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1, -1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1, -1]),
    "FP32": ("fp32_contents", [1.5, -0.0, 3e38]),
    "FP64": ("fp64_contents", [1.5, -0.0, 1e308]),
}


# ---- data ----


@pytest.mark.parametrize("datatype", models.DATATYPES)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_raw_contents_of_every_datatype(stub, datatype, count):
    if datatype == "BYTES":
        raw = b"".join(struct.pack("<I", size) + b"\xff" * size for size in range(count))
    else:
        itemsize = 2 if datatype == "BF16" else next(t.itemsize for t, name in DATATYPES.items() if name == datatype)
        raw = bytes(position % 2 for position in range(count * itemsize))
    message = pb.ModelInferRequest(model_name=f"type_{datatype.lower()}", raw_input_contents=[raw])
    message.inputs.add(name="INPUT0", datatype=datatype, shape=[count])
    response = stub.ModelInfer(message)
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == (datatype, [count])
    assert list(response.raw_output_contents) == [raw]
    assert not response.outputs[0].HasField("contents")


@pytest.mark.parametrize("datatype", TYPED)
def test_numbers_in_typed_contents_are_those_of_raw_contents(stub, datatype):
    field, values = TYPED[datatype]
    message = pb.ModelInferRequest(model_name=f"type_{datatype.lower()}")
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values)
    dtype = next(dtype for dtype, name in DATATYPES.items() if name == datatype)
    assert stub.ModelInfer(message).raw_output_contents[0] == np.array(values, dtype).tobytes()


def test_narrow_integers_keep_their_low_bytes(stub):
    message = pb.ModelInferRequest(model_name="type_uint8")
    message.inputs.add(name="INPUT0", datatype="UINT8", shape=[3]).contents.uint_contents.extend([256, 257, 0x1FF])
    assert stub.ModelInfer(message).raw_output_contents[0] == bytes([0, 1, 255])


def test_strings_in_typed_contents_get_their_lengths(stub):
    message = pb.ModelInferRequest(model_name="strings")
    message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 2]).contents.bytes_contents.extend([b"\xff\0", b""])
    assert stub.ModelInfer(message).raw_output_contents[0] == b"\x02\0\0\0\xff\0\0\0\0\0"


# ---- shapes and outputs ----


def test_the_whole_response(stub):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    message = request("pair", array, np.ones((3, 2, 2), np.int32), id="my id")
    tensor = pb.ModelInferResponse.InferOutputTensor
    response = stub.ModelInfer(message)
    response.parameters.clear()
    assert response == pb.ModelInferResponse(
        model_name="pair",
        model_version="1",
        id="my id",
        outputs=[
            tensor(name="OUTPUT0", datatype="FP32", shape=[3, 4]),
            tensor(name="OUTPUT1", datatype="INT32", shape=[3, 2, 2]),
        ],
        raw_output_contents=[array.tobytes(), np.ones(12, np.int32).tobytes()],
    )


def test_inputs_in_any_order(stub):
    message = request("pair", floats(1, 2, 3, 4), np.ones((1, 2, 2), np.int32))
    message.inputs.insert(0, message.inputs.pop())
    message.raw_input_contents.insert(0, message.raw_input_contents.pop())
    assert output(stub.ModelInfer(message)).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("wanted", [["OUTPUT0"], ["OUTPUT1"], ["OUTPUT0", "OUTPUT1"]])
def test_only_the_outputs_asked_for(stub, wanted):
    message = request("pair", floats(1, 2, 3, 4), np.ones((1, 2, 2), np.int32), outputs=wanted)
    response = stub.ModelInfer(message)
    assert [tensor.name for tensor in response.outputs] == wanted
    assert len(response.raw_output_contents) == len(wanted)


def test_an_optional_input_may_be_absent(stub):
    assert output(stub.ModelInfer(request("optional", floats(1, 2, 3, 4), outputs=["OUTPUT0"]))).size == 4


def test_model_without_batching(stub):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (output(stub.ModelInfer(request("whole", array))) == array).all()


@pytest.mark.parametrize(("asked", "got"), [("", "3"), ("1", "1"), ("3", "3")])
def test_a_request_reaches_its_version_or_the_latest(stub, asked, got):
    assert stub.ModelInfer(request("versions", floats(1, 2, 3, 4), version=asked)).model_version == got


def test_parameters_are_accepted(stub):
    parameters = {"priority": 1, "timeout": 10_000_000, "mine": "x", "real": 1.5, "flag": True}
    assert stub.ModelInfer(request("simple", floats(1), parameters=parameters)).raw_output_contents


# ---- classification ----


def classify(stub, k, *rows):
    message = request("scores", np.array(rows, np.float32))
    message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = k
    response = stub.ModelInfer(message)
    assert response.outputs[0].datatype == "BYTES"
    raw, texts = response.raw_output_contents[0], []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        texts.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return list(response.outputs[0].shape), texts


def test_the_best_classes_come_with_value_index_and_label(stub):
    shape, texts = classify(stub, 2, (0.1, 0.5, 0.25, 0), (4, 3, 2, 1))
    assert shape == [2, 2]
    assert texts == ["0.500000:1:dog", "0.250000:2:eel", "4.000000:0:cat", "3.000000:1:dog"]


def test_classification_of_more_classes_than_there_are(stub):
    shape, texts = classify(stub, 100, (1, 2, 3, 4))
    assert shape == [1, 4]
    assert texts[0] == "4.000000:3:fox"


# ---- deadlines and cancellation ----


def test_a_request_past_its_deadline_ends_and_the_next_is_answered(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request("hang", floats(1)), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert stub.ModelInfer(request("simple", floats(1))).raw_output_contents


def test_deadline_and_cancellation_take_requests_out_of_the_engine(stub, control):
    wait_until(lambda: control.live_requests() == 0)  # those of other tests
    cancelled = [stub.ModelInfer.future(request("hang", floats(1))) for _ in range(20)]
    wait_until(lambda: control.live_requests() == 20)
    late = [stub.ModelInfer.future(request("hang", floats(1)), timeout=0.5) for _ in range(20)]
    for call in cancelled:
        call.cancel()
    wait_until(lambda: control.live_requests() == 0)
    assert {call.code() for call in cancelled} == {grpc.StatusCode.CANCELLED}
    assert {call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}


# ---- sizes and numbers ----


@pytest.mark.parametrize("megabytes", [5, 64])
def test_messages_larger_than_grpcs_default_limit_are_answered(stub, megabytes):
    array = np.random.default_rng(1).random((1, megabytes * 2**18), np.float32)
    assert stub.ModelInfer(request("simple", array)).raw_output_contents[0] == array.tobytes()


def test_a_maximum_message_size(door):
    if door == "target":
        pytest.skip("needs a server with a limit")
    with (
        doors.running_door(door, "--max-message-bytes", "100000") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        assert stub.ModelInfer(request("simple", np.zeros((1, 24_000), np.float32))).raw_output_contents
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request("simple", np.zeros((1, 26_000), np.float32)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "100000" in caught.value.details()
        assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_every_answer_is_its_own(server):
    """Four threads with a connection each, and many requests in flight."""
    wrong = []

    def work(seed):
        with grpc.insecure_channel(server, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = Stub(channel)
            rng = np.random.default_rng(seed)
            arrays = [rng.random((int(rng.integers(1, 8)), int(rng.integers(1, 50))), np.float32) for _ in range(100)]
            calls = [
                stub.ModelInfer.future(request("simple", array, id=f"{seed}-{number}"))
                for number, array in enumerate(arrays)
            ]
            for number, (call, array) in enumerate(zip(calls, arrays, strict=True)):
                response = call.result(60)
                if response.id != f"{seed}-{number}" or output(response).tobytes() != array.tobytes():
                    wrong.append(response)

    in_threads(work, range(4))
    assert not wrong
