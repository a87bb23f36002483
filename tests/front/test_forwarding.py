"""Headers as request parameters: what a Python model sees of them, on both doors, for each way a request comes."""

from __future__ import annotations

import json
import re

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from inferd._native.service.forwarding import RESERVED, Forwarder, ReservedError
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors, raw
from tests.conformance.client import Stub
from tests.framing import framed

MODEL = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        told = np.array([[request.parameters().encode()]], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("PARAMETERS", told)])
"""
CONFIG = """backend: "python"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "PARAMETERS" data_type: TYPE_STRING dims: [ 1 ] }
"""
PATTERN = "--grpc-header-forward-pattern=^x-|trace"
COMPRESSIONS = [grpc.Compression.Gzip, grpc.Compression.Deflate]


# ---- without a server -----------------------------------------------------------------------------------------------


def parameters(pattern, *metadata, message=b""):
    """The parameters of a message with those of the metadata appended."""
    appended = Forwarder(pattern).parameters(metadata)
    decoded = pb.ModelInferRequest.FromString(message + appended)
    return {key: MessageToDict(value)["stringParam"] for key, value in decoded.parameters.items()}


def test_the_pattern_is_looked_for_anywhere_and_in_any_case():
    metadata = (("x-user", "ann"), ("my-x-user", "bob"), ("other", "c"))
    assert parameters("X-U", *metadata) == {"x-user": "ann", "my-x-user": "bob"}
    assert parameters("^x", *metadata) == {"x-user": "ann"}
    assert parameters("^nothing$", *metadata) == {}


def test_a_header_counts_more_than_the_parameter_of_its_name():
    sent = pb.ModelInferRequest(model_name="m")
    sent.parameters["x-user"].string_param = "forged"
    sent.parameters["kept"].string_param = "as it was"
    found = parameters(".", ("x-user", "ann"), message=sent.SerializeToString())
    assert found == {"x-user": "ann", "kept": "as it was"}


def test_binary_metadata_and_very_long_names_are_not_forwarded():
    assert parameters(".", ("a-bin", b"\xff"), ("n" * 257, "v"), ("n" * 256, "v")) == {"n" * 256: "v"}


@pytest.mark.parametrize("name", [*sorted(RESERVED), "triton_anything"])
def test_parameters_of_tritons_own_are_refused(name):
    with pytest.raises(ReservedError, match=f"'{name}' is reserved for Triton usage and cannot be forwarded"):
        parameters(".", (name, "1"))
    assert parameters("^x-", (name, "1")) == {}


def test_a_pattern_that_is_none():
    with pytest.raises(re.error):
        Forwarder("(")


# ---- with one -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository_of_told(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "told" / "1").mkdir(parents=True)
    (root / "told" / "config.pbtxt").write_text(CONFIG)
    (root / "told" / "1" / "model.py").write_text(MODEL)
    return root


@pytest.fixture(scope="module", params=doors.NAMES)
def address(request, repository_of_told):
    with doors.running_server(request.param, repository_of_told, PATTERN) as process:
        yield process.address


@pytest.fixture
def stub(address):
    with grpc.insecure_channel(address) as channel:
        yield Stub(channel)


def request(size=4, **given):
    message = pb.ModelInferRequest(model_name="told", raw_input_contents=[bytes(size)])
    message.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, size])
    for key, value in given.items():
        message.parameters[key].string_param = value
    return message


def told(response):
    """The parameters that the model saw."""
    return json.loads(response.raw_output_contents[0][4:])


METADATA = (("x-user", "ann"), ("x-empty", ""), ("a-trace-id", "7"), ("other", "no"))
SEEN = {"x-user": "ann", "x-empty": "", "a-trace-id": "7"}


@pytest.mark.parametrize("size", [4, 63, 64, 100_000])
def test_a_unary_call_is_told_the_headers_that_match_and_its_own_parameters(stub, size):
    assert told(stub.ModelInfer(request(size, own="yes"), metadata=METADATA)) == {**SEEN, "own": "yes"}
    assert told(stub.ModelInfer(request(size), metadata=(("other", "no"),))) == {}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [4, 300_000, (1 << 20) - 64, 1 << 20])
def test_a_compressed_call(stub, size, compression):
    answer = stub.ModelInfer(request(size), metadata=METADATA, compression=compression)
    assert told(answer) == SEEN


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, *COMPRESSIONS])
def test_forwarded_headers_count_as_bytes_of_their_client(repository_of_told, compression):
    """Guards the limit of the server's memory: each request has a copy of the headers."""
    with (
        doors.running_server("native", repository_of_told, PATTERN, "--grpc-max-bytes-per-client=12000") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        call = Stub(channel).ModelInfer
        assert told(call(request(), metadata=(("other", "v" * 14_000),), compression=compression)) == {}
        with pytest.raises(grpc.RpcError) as error:
            call(request(), metadata=(("x-long", "v" * 14_000),), compression=compression)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes in flight, which is more than its limit of 12000" in error.value.details()


def test_each_request_of_a_stream(stub):
    responses = stub.ModelStreamInfer(iter([request(own=str(number)) for number in range(3)]), metadata=METADATA)
    assert [told(each.infer_response) for each in responses] == [{**SEEN, "own": str(number)} for number in range(3)]


def swallowing(headers, message):
    """An encoded request that ends within a field as long as these headers are when they are encoded."""
    size = len(Forwarder("^x-|trace").parameters(headers))
    assert size < 128
    return message.SerializeToString() + bytes([15 << 3 | 2, size])


def test_a_message_cannot_swallow_the_headers(stub):
    """Headers are decoded apart from the client's bytes."""
    headers = (("x-user", "alice"),)
    forged = swallowing(headers, request(**{"x-user": "admin"}))
    with pytest.raises(grpc.RpcError) as error:
        stub.raw("ModelInfer")(forged, metadata=headers)
    assert "not a valid inference.ModelInferRequest message" in error.value.details()
    stream = pb.ModelStreamInferResponse.FromString(
        next(stub.raw("ModelStreamInfer")(iter([forged]), metadata=headers))
    )
    assert "not a valid inference.ModelInferRequest message" in stream.error_message
    assert told(stub.ModelInfer(request(), metadata=headers)) == {"x-user": "alice"}


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_parameter_cannot_stand_for_a_header(stub, size):
    """Whether the client sent the header or not; other parameters are the client's own."""
    forged = request(size, **{"x-user": "admin", "X-User": "admin", "own": "yes"})
    assert told(stub.ModelInfer(forged, metadata=(("other", "no"),))) == {"own": "yes"}
    assert told(stub.ModelInfer(forged, metadata=(("x-user", "ann"),))) == {"own": "yes", "x-user": "ann"}
    (response,) = stub.ModelStreamInfer(iter([forged]), metadata=(("other", "no"),))
    assert told(response.infer_response) == {"own": "yes"}


@pytest.mark.parametrize("door", doors.NAMES)
def test_the_key_of_a_restricted_protocol_is_not_forwarded(door, repository_of_told):
    """The key is a secret between the caller and the server, so no pattern forwards it."""
    options = ("--grpc-header-forward-pattern=.", "--grpc-restricted-protocol=inference:admin-key=secret")
    metadata = (("triton-grpc-protocol-admin-key", "secret"), ("x-user", "ann"))
    server = doors.running_server(door, repository_of_told, *options)
    with server as process, grpc.insecure_channel(process.address) as channel:
        seen = told(Stub(channel).ModelInfer(request(), metadata=metadata))
        forged = request(**{"triton-grpc-protocol-admin-key": "forged", "x-user-bin": "forged"})
        assert "forged" not in told(Stub(channel).ModelInfer(forged, metadata=metadata)).values()
    assert seen["x-user"] == "ann"
    assert "secret" not in seen.values()


def test_many_headers_before_a_message_that_comes_byte_by_byte(address):
    """What is received at first has little room; the headers that are put behind the message have room of their own."""
    message = request(3000).SerializeToString()
    headers = {f"x_{number}": "v" * 3000 for number in range(2)}
    with raw.Client(address) as client:
        for _ in range(50):
            stream = client.headers("/inference.GRPCInferenceService/ModelInfer", **headers)
            client.data(stream, framed(message)[:6])
            client.data(stream, framed(message)[6:], end=True)
            answer = client.answer(stream, timeout=60)
            assert answer.status == 0
            seen = told(pb.ModelInferResponse.FromString(answer.messages[0]))
            assert seen == {name.replace("_", "-"): value for name, value in headers.items()}


def test_sixty_headers_are_all_forwarded(stub):
    metadata = tuple((f"x-{number}", "v" * 50) for number in range(60))
    assert told(stub.ModelInfer(request(), metadata=metadata)) == dict(metadata)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reserved_name_is_refused_only_if_it_matches(stub, stream):
    def call(*metadata):
        if stream:
            return [each.infer_response for each in stub.ModelStreamInfer(iter([request()]), metadata=metadata)]
        return [stub.ModelInfer(request(), metadata=metadata)]

    with pytest.raises(grpc.RpcError) as error:
        call(("triton_trace", "1"))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'triton_trace' is reserved for Triton usage and cannot be forwarded" in error.value.details()
    assert told(call(("priority", "1"))[0]) == {}
