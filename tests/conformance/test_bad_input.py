"""Wrong requests: the exact status, the text that Triton's clients know with what was expected and got, and a
connection that lives on. One table, sent as a unary call and in a stream.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance.client import floats, request

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
INTERNAL = grpc.StatusCode.INTERNAL
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

PAIR = (floats(1, 2, 3, 4), np.ones((1, 2, 2), np.int32))


@dataclass(frozen=True)
class Case:
    """A message and what must come back: the code, and texts that the details contain in this order."""

    name: str
    message: pb.ModelInferRequest
    texts: tuple[str, ...]
    code: grpc.StatusCode = INVALID
    prefixed: bool | None = None  # whether the details start with the request's id; None: either


def simple(**changes):
    """A good request to `simple` with fields of its input changed; `raw` replaces its content."""
    message = request("simple", floats(1, 2), id="r1")
    if "raw" in changes:
        message.raw_input_contents[:] = changes.pop("raw")
    tensor = message.inputs[0]
    for field, value in changes.items():
        if field == "shape":
            tensor.shape[:] = value
        else:
            setattr(tensor, field, value)
    return message


def in_region(tensor):
    """Have the tensor refer to a region."""
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 8


def changed(message, change):
    change(message)
    return message


def typed(model, datatype, shape, field, values):
    message = pb.ModelInferRequest(model_name=model, id="r1")
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return message


def with_parameter(key, kind=None, value=None):
    def change(message):
        message.parameters[key].SetInParent()
        if kind:
            setattr(message.parameters[key], kind, value)

    return changed(simple(), change)


def with_output(*names, **parameters):
    message = simple()
    for name in names:
        asked = message.outputs.add(name=name)
        for key, (kind, value) in parameters.items():
            setattr(asked.parameters[key], kind, value)
    return message


def strings(shape, raw):
    message = pb.ModelInferRequest(model_name="strings", id="r1", raw_input_contents=[raw])
    message.inputs.add(name="INPUT0", datatype="BYTES", shape=shape)
    return message


def text(*elements):
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


MODEL = [
    Case("unknown model", request("nothing", floats(1)),
        ("Request for unknown model: 'nothing' is not found",), NOT_FOUND),
    Case("unknown model with a long name, which is cut between two characters", request("x" + 200 * "ä", floats(1)),
        ("Request for unknown model: 'x" + 127 * "ä", "' is not found",), NOT_FOUND),
    Case("no model name", request("", floats(1)), ("unknown model: ''",), NOT_FOUND),
    Case("empty message", pb.ModelInferRequest(), ("unknown model: ''",), NOT_FOUND),
    Case("unknown version", request("versions", floats(1, 2, 3, 4), version="2"), ("is not found",), NOT_FOUND),
    Case("version that is no number", request("simple", floats(1), version="one"), (
        "failed to get model version from specified version string 'one' (details: stol), version should be an "
        "integral value > 0",)),
    Case("negative version", request("simple", floats(1), version="-7"), ("invalid model version specified",)),
]  # fmt: skip

NAMES_AND_COUNTS = [
    Case("unknown input", simple(name="INPUT7"),
        ("unexpected inference input 'INPUT7' for model 'simple'",), prefixed=False),
    Case("unknown input with a long name, which is cut between two characters", simple(name="x" + 200 * "ä"),
        ("unexpected inference input 'x" + 127 * "ä", "' for model 'simple'",), prefixed=False),
    Case("no input name", simple(name=""), ("unexpected inference input '' for model 'simple'",), prefixed=False),
    Case("unknown output", with_output("OUTPUT7"),
        ("unexpected inference output 'OUTPUT7' for model 'simple'",), prefixed=False),
    Case("duplicate input", changed(
        simple(), lambda m: (m.inputs.append(m.inputs[0]), m.raw_input_contents.append(m.raw_input_contents[0]))),
        ("input 'INPUT0' already exists in request",), prefixed=True),
    Case("duplicate output", with_output("OUTPUT0", "OUTPUT0"),
        ("output 'OUTPUT0' already exists in request",), prefixed=True),
    Case("one input missing", changed(request("pair", PAIR[0], id="r1"), lambda m: None), (
        "expected 2 inputs but got 1 inputs for model 'pair'. Got input(s) ['INPUT0'], but missing required input(s) "
        "['INPUT1']. Please provide all required input(s).",), prefixed=True),
    Case("all inputs missing", request("pair", id="r1"), (
        "expected 2 inputs but got 0 inputs for model 'pair'. Got input(s) [], but missing required input(s) "
        "['INPUT0','INPUT1'].",), prefixed=True),
    Case("a required input missing beside an optional one", changed(
        request("optional", floats(1, 2, 3, 4), id="r1"), lambda m: setattr(m.inputs[0], "name", "INPUT1")), (
        "expected number of inputs between 1 and 2 but got 1", "missing required input(s) ['INPUT0']"), prefixed=True),
]  # fmt: skip

DATA = [
    Case("raw and typed contents", changed(simple(), lambda m: m.inputs[0].contents.fp32_contents.extend([1, 2])), (
        "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'simple'",)),
    Case("no data", simple(raw=[]), ("unable to find data for input tensor 'INPUT0' for model 'simple' in request.",)),
    Case("raw contents for one of two inputs", changed(
        request("pair", *PAIR), lambda m: m.raw_input_contents.pop()),
        ("unable to find data for input tensor 'INPUT1' for model 'pair' in request.",)),
    Case("typed contents of another kind", typed("simple", "FP32", [1, 2], "int_contents", [1, 2]), (
        "unexpected explicit tensor data for input tensor 'INPUT0'", "simple", "fp32_contents")),
    Case("typed contents for a datatype that has none", typed("type_fp16", "FP16", [2], "fp32_contents", [1, 2]), (
        "unexpected explicit tensor data for input tensor 'INPUT0'",)),
    *(Case(f"typed contents of another kind than {field}", typed(
        f"type_{datatype.lower()}", datatype, [2], "bytes_contents", [b"1", b"2"]), (
        "unexpected explicit tensor data for input tensor 'INPUT0'", field)) for datatype, field in (
        ("BOOL", "bool_contents"), ("INT8", "int_contents"), ("INT64", "int64_contents"), ("UINT16", "uint_contents"),
        ("UINT64", "uint64_contents"), ("FP32", "fp32_contents"), ("FP64", "fp64_contents"))),
    Case("typed contents of another kind than bytes_contents", typed("type_bytes", "BYTES", [1], "int_contents", [1]), (
        "unexpected explicit tensor data for input tensor 'INPUT0'", "bytes_contents")),
    Case("too few typed values", typed("simple", "FP32", [1, 3], "fp32_contents", [1, 2]), (
        "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 12, got 8",), prefixed=True),
    Case("more raw contents than inputs", simple(raw=[bytes(8), bytes(8)]), ("expected 1", "got 2")),
    Case("too few bytes", simple(raw=[bytes(7)]), (
        "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 8, got 7",), prefixed=True),
    Case("too many bytes", simple(raw=[bytes(12)]), (
        "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 8, got 12",), prefixed=True),
    Case("no bytes", simple(raw=[b""]), ("Expected 8, got 0",), prefixed=True),
    Case("shared memory", changed(simple(), lambda m: in_region(m.inputs[0])), ("shared memory", "INPUT0"),
        UNIMPLEMENTED),
]  # fmt: skip

DATATYPE_AND_SHAPE = [
    Case("another datatype", simple(datatype="INT32"), (
        "inference input 'INPUT0' data-type is 'INT32', but model 'simple' expects 'FP32'",), prefixed=True),
    Case("a datatype that does not exist", simple(datatype="FLOAT"), ("data-type is 'FLOAT'", "expects 'FP32'")),
    Case("no datatype", simple(datatype=""), ("data-type is ''", "expects 'FP32'")),
    Case("the configuration's spelling", simple(datatype="TYPE_FP32"), ("data-type is 'TYPE_FP32'", "expects 'FP32'")),
    Case("another dimension", request("pair", floats(1, 2, 3), PAIR[1], id="r1"), (
        "unexpected shape for input 'INPUT0' for model 'pair'. Expected [-1,4], got [1,3].", "NOTE", "max_batch_size"),
        prefixed=True),
    Case("too many dimensions", simple(shape=[1, 2, 1]), ("Expected [-1,-1], got [1,2,1].",)),
    Case("no batch dimension", request("pair", floats(1, 2, 3, 4)[0], PAIR[1]), ("batch",)),
    Case("another shape without batching", request("whole", np.zeros((3, 1), np.float32), id="r1"), (
        "unexpected shape for input 'INPUT0' for model 'whole'. Expected [2,-1], got [3,1].",), prefixed=True),
    Case("negative dimension", simple(shape=[1, -1]), (
        "All input dimensions should be specified for input 'INPUT0' for model 'simple'", "-1"), prefixed=True),
    Case("negative batch dimension", simple(shape=[-1, 2]), ("All input dimensions should be specified", "-1")),
    Case("no shape", simple(shape=[]), ("has no shape but model requires batch dimension", "simple"), prefixed=True),
    Case("batch too large", request("simple", np.zeros((9, 1), np.float32), id="r1"), (
        "inference request batch-size must be <= 8 for 'simple'", "9"), prefixed=True),
    Case("empty batch", request("simple", np.zeros((0, 1), np.float32)), ("batch-size must be",)),
    Case("batches that differ", request("pair", np.zeros((2, 4), np.float32), PAIR[1], id="r1"), (
        "input 'INPUT1' batch size does not match other inputs for 'pair'", "2", "1"), prefixed=True),
    Case("more elements than fit 64 bits", simple(shape=[2, 2**62]), ("INPUT0",), prefixed=True),
    Case("more bytes than fit 64 bits", simple(shape=[1, 2**62]), ("INPUT0",), prefixed=True),
    Case("more elements than fit, but for a zero", simple(shape=[1, 2**62, 2**62, 0]), ("INPUT0",), prefixed=True),
    Case("as many dimensions as one likes", simple(shape=[1] * 5000), ("INPUT0",), prefixed=True),
]  # fmt: skip

STRINGS = [
    Case("too few strings", strings([1, 3], text(b"a", b"b")), (
        "expected 3 string elements", "'INPUT0' for model 'strings', got 2"), prefixed=True),
    Case("too many strings", strings([1, 1], text(b"a", b"b")), (
        "unexpected number of string elements 2", "'INPUT0' for model 'strings', expecting 1"), prefixed=True),
    Case("half a length", strings([1, 2], text(b"a") + b"\1\0"), (
        "incomplete string length indicator",
        "'INPUT0' for model 'strings', expecting 4 bytes but only 2 bytes available"),
        prefixed=True),
    Case("half a string", strings([1, 1], text(b"abcd")[:-1]), (
        "incomplete string data",
        "'INPUT0' for model 'strings', expecting string of length 4 but only 3 bytes available"),
        prefixed=True),
    Case("a length of four gigabytes", strings([1, 1], b"\xff\xff\xff\xff"), (
        "expecting string of length 4294967295 but only 0 bytes available",), prefixed=True),
]  # fmt: skip

PARAMETERS = [
    Case("sequence_id", with_parameter("sequence_id", "double_param", 1.0), (
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param",)),
    Case("sequence_start", with_parameter("sequence_start", "int64_param", 1), (
        "invalid value type for 'sequence_start' parameter, expected bool_param",)),
    Case("sequence_end", with_parameter("sequence_end", "string_param", "true"), (
        "invalid value type for 'sequence_end' parameter, expected bool_param",)),
    Case("priority as text", with_parameter("priority", "string_param", "1"), ("'priority' parameter, expected",)),
    Case("negative priority", with_parameter("priority", "int64_param", -1), ("'priority' parameter, expected",)),
    Case("timeout as a real number", with_parameter("timeout", "double_param", 1.0), (
        "invalid value type for 'timeout' parameter, expected int64_param",)),
    Case("reserved prefix", with_parameter("triton_mine", "bool_param", True), ("triton_", "reserved")),
    Case("empty final as text", with_parameter("triton_enable_empty_final_response", "string_param", "1"), (
        "'triton_enable_empty_final_response' parameter, expected bool_param",)),
    Case("parameter without a value", with_parameter("mine"), (
        "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param",)),
    Case("parameter of an unsigned kind", with_parameter("mine", "uint64_param", 1), (
        "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param",)),
    Case("classification as text", with_output("OUTPUT0", classification=("string_param", "1")), (
        "invalid value type for 'classification' parameter, expected int64_param",)),
    Case("classification of nothing", with_output("OUTPUT0", classification=("int64_param", 0)),
        ("'classification'", "0")),
    Case("classification of less", with_output("OUTPUT0", classification=("int64_param", -3)),
        ("'classification'", "-3")),
    Case("shared memory for an output", with_output(
        "OUTPUT0", shared_memory_region=("string_param", "r"), shared_memory_byte_size=("int64_param", 8)), (
        "shared memory", "OUTPUT0"), UNIMPLEMENTED),
]  # fmt: skip

CASES = MODEL + NAMES_AND_COUNTS + DATA + DATATYPE_AND_SHAPE + STRINGS + PARAMETERS

CLASSIFICATION_TYPES = ("FP16", "BF16", "BOOL", "BYTES")

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


def check(case, details):
    pattern = ".*".join(re.escape(part) for part in case.texts)
    assert re.search(pattern, details, re.DOTALL | re.IGNORECASE), f"expected {case.texts}, got {details!r}"
    prefix = f"[request id: {case.message.id or '<id_unknown>'}] "
    if case.prefixed is not None:
        assert details.startswith(prefix) == case.prefixed, details


def refused(call, message):
    with pytest.raises(grpc.RpcError) as caught:
        call(message)
    return caught.value.code(), caught.value.details()


def good(stub):
    return stub.ModelInfer(request("simple", floats(1), id="alive")).id == "alive"


@by_name
def test_a_wrong_request_is_refused_with_its_status_and_text(stub, case):
    code, details = refused(stub.ModelInfer, case.message)
    assert code is case.code, details
    check(case, details)
    assert good(stub)


@by_name
def test_in_a_stream_between_good_requests(stub, case):
    messages = [request("simple", floats(1), id="before"), case.message, request("simple", floats(2), id="after")]
    before, bad, after = stub.ModelStreamInfer(iter(messages))
    assert (before.infer_response.id, after.infer_response.id) == ("before", "after")
    assert not (before.error_message or after.error_message)
    check(case, bad.error_message)
    assert bad.infer_response.id == case.message.id
    assert not bad.infer_response.outputs


@by_name
def test_status_of_a_stream_that_asks_for_it(stub, case):
    call = stub.ModelStreamInfer(iter([case.message]), metadata=(("triton_grpc_error", "true"),))
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is case.code
    check(case, caught.value.details())


@pytest.mark.parametrize("datatype", CLASSIFICATION_TYPES)
def test_classification_of_a_datatype_without_an_order(stub, datatype):
    raw = text(b"a", b"b") if datatype == "BYTES" else bytes(2 if datatype == "BOOL" else 4)
    message = pb.ModelInferRequest(model_name=f"type_{datatype.lower()}", raw_input_contents=[raw])
    message.inputs.add(name="INPUT0", datatype=datatype, shape=[2])
    message.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1
    code, details = refused(stub.ModelInfer, message)
    assert code is INVALID
    assert "class result not available for output due to unsupported type" in details
    assert good(stub)


# ---- bytes that are no ModelInferRequest (the texts are ours: Triton's come out of its protobuf library) ----

MALFORMED = {
    "truncated tag": b"\x80",
    "truncated length": b"\x0a",
    "length past the end": b"\x0a\x05abc",
    "length of 2 GiB": b"\x0a\xff\xff\xff\xff\x07",
    "length of 10 bytes": b"\x0a" + b"\xff" * 9 + b"\x01",
    "field 0": b"\x00\x00",
    "trailing zero": b"\x0a\x01a\x00",
    "wire type 6": b"\x0e",
    "wire type 7": b"\x0f",
    "stray end of a group": b"\x0c",
    "group without an end": b"\x5b",
    "group with another end": b"\x5b\x64",
    "a varint of 11 bytes": b"\x58" + b"\xff" * 10 + b"\x01",
    "101 groups": b"\x5b" * 101 + b"\x5c" * 101,
    "invalid UTF-8 in the model's name": b"\x0a\x02\xc3\x28",
    "surrogate in an id": b"\x1a\x03\xed\xa0\x80",
    "overlong NUL": b"\x12\x02\xc0\x80",
    "invalid UTF-8 in a parameter's key": b"\x22\x03\x0a\x01\xff",
    "truncated input": b"\x2a\x03\x0a\x05I",
    "truncated packed shape": b"\x2a\x03\x1a\x01\x80",
    "packed floats that end in the middle": b"\x2a\x05\x2a\x03\x32\x01\x00",
    "text": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED, ids=lambda name: name.replace(" ", "-"))
def test_bytes_that_are_no_message_are_refused_with_their_size(stub, name):
    code, details = refused(stub.raw("ModelInfer"), MALFORMED[name])
    assert code is INTERNAL
    assert f"{len(MALFORMED[name])} bytes" in details
    assert good(stub)


@pytest.mark.parametrize("name", MALFORMED, ids=lambda name: name.replace(" ", "-"))
def test_malformed_message_in_a_stream(stub, name):
    messages = [MALFORMED[name], request("simple", floats(2), id="after").SerializeToString()]
    bad, after = map(pb.ModelStreamInferResponse.FromString, stub.raw("ModelStreamInfer")(iter(messages)))
    assert f"{len(MALFORMED[name])} bytes" in bad.error_message
    assert after.infer_response.id == "after"


def test_every_truncation_of_a_message(stub):
    whole = request("pair", *PAIR, id="r1", outputs=["OUTPUT0"], parameters={"mine": "x"}).SerializeToString()
    call = stub.raw("ModelStreamInfer")(whole[:size] for size in range(len(whole) + 1))
    responses = [pb.ModelStreamInferResponse.FromString(response) for response in call]
    assert [bool(response.error_message) for response in responses] == [True] * len(whole) + [False]
