"""Official protobuf (upb) as the oracle of the codec, and the comparison with it."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError

from inferd._native.protobuf import messages
from inferd_client.pb import grpc_service_pb2 as pb
from tests.native.protowire import clean_entries, has_long_length

# The pure Python implementation accepts much that the others reject: it is no oracle.
assert api_implementation.Type() == "upb"

ROOT = Path(__file__).parents[2]
CONTENTS_FIELDS = {field.number: field.name for field in pb.InferTensorContents.DESCRIPTOR.fields}

# Each datatype: its field of InferTensorContents, and the numpy type of the raw elements
DATATYPES = {
    "BOOL": (1, np.dtype("?")),
    "INT8": (2, np.dtype("<i1")),
    "INT16": (2, np.dtype("<i2")),
    "INT32": (2, np.dtype("<i4")),
    "INT64": (3, np.dtype("<i8")),
    "UINT8": (4, np.dtype("<u1")),
    "UINT16": (4, np.dtype("<u2")),
    "UINT32": (4, np.dtype("<u4")),
    "UINT64": (5, np.dtype("<u8")),
    "FP32": (6, np.dtype("<f4")),
    "FP64": (7, np.dtype("<f8")),
    "BYTES": (8, None),
}


def parse(data: bytes) -> pb.ModelInferRequest | None:
    """The message, or None when it is malformed."""
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None


def parse_cpp(data: bytes) -> pb.ModelInferRequest | None:
    """The message as the C++ implementation, which is inside protoc, reads it. Slow: it starts a process."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", "--decode=inference.ModelInferRequest"]
    protoc = subprocess.run([*command, "grpc_service.proto"], input=data, capture_output=True, cwd=ROOT)
    if protoc.returncode:
        assert b"Failed to parse input" in protoc.stderr, protoc.stderr
        return None
    return text_format.Parse(protoc.stdout, pb.ModelInferRequest(), allow_unknown_field=True)


def _exact(value: object) -> object:
    """A value that equals another only when both are the same: NaN equals itself, 0.0 is not -0.0."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def _parameters(parameters) -> dict[str, tuple[str, object]]:
    found = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[key] = (kind, _exact(getattr(parameter, kind))) if kind else ("", None)
    return found


def _input(tensor) -> messages.DecodedInput:
    values = {n: getattr(tensor.contents, name) for n, name in CONTENTS_FIELDS.items()}
    return messages.DecodedInput(
        tensor.name,
        tensor.datatype,
        tuple(tensor.shape),
        _parameters(tensor.parameters),
        tensor.HasField("contents"),
        sum(1 << n for n, v in values.items() if len(v)),
        sum(map(len, values.values())),
        sum(map(len, tensor.contents.bytes_contents)),
    )


def content(message: pb.ModelInferRequest) -> messages.DecodedRequest:
    """What our decoder is to return for this message."""
    return messages.DecodedRequest(
        message.model_name,
        message.model_version,
        message.id,
        _parameters(message.parameters),
        tuple(map(_input, message.inputs)),
        tuple(messages.DecodedOutput(o.name, _parameters(o.parameters)) for o in message.outputs),
        tuple(message.raw_input_contents),
    )


def contents(tensor, datatype: str) -> bytes:
    """The typed contents of an InferInputTensor as raw bytes of `datatype`, as our decoder is to write them."""
    field, dtype = DATATYPES[datatype]
    values = getattr(tensor.contents, CONTENTS_FIELDS[field])
    if dtype is None:
        return b"".join(struct.pack("<I", len(v)) + v for v in values)
    if dtype.kind == "f":
        return struct.pack(f"<{len(values)}{dtype.char}", *values)
    wide = np.array(list(values), np.uint64 if dtype.kind == "u" else np.int64)
    return wide.astype(dtype).tobytes()  # of an integer, astype keeps the low bytes


def ours(decoder: messages.Decoder, data: bytes) -> messages.DecodedRequest | None:
    """Our decoding, comparable with `content`; None when it refuses."""
    try:
        request = decoder.decode(data)
    except ValueError as error:
        if type(error) is not ValueError:  # text that should have been refused cannot be made a str
            raise
        return None

    def exact(parameters):
        return {key: (kind, _exact(value)) for key, (kind, value) in parameters.items()}

    return request._replace(
        parameters=exact(request.parameters),
        inputs=tuple(i._replace(parameters=exact(i.parameters)) for i in request.inputs),
        outputs=tuple(o._replace(parameters=exact(o.parameters)) for o in request.outputs),
    )


def _same_elements(a: bytes, b: bytes, datatype: str) -> bool:
    # upb gives an FP32 to Python as a double, which makes a signalling NaN a quiet one
    return a == b or (datatype == "FP32" and np.array_equal(*(np.frombuffer(x, "<f4") for x in (a, b)), equal_nan=True))


def check(data: bytes, decoder: messages.Decoder | None = None) -> bool:
    """Assert that our decoder and official protobuf agree on these bytes; whether both accept them."""
    decoder = decoder or messages.Decoder()
    found = ours(decoder, data)
    message = parse(data)
    if found is None or message is None:
        assert found is None, f"only we accept {data.hex()}"
        assert message is None or has_long_length(data), f"only we refuse {data.hex()}"
        return False
    if found != content(message):
        message = parse(clean_entries(data))
        assert found == content(message), data.hex()
    for index, tensor in enumerate(message.inputs):
        mask = found.inputs[index].contents_mask
        for datatype, (field, _) in DATATYPES.items():
            if mask == 1 << field:
                copied = decoder.contents(index, datatype)
                assert _same_elements(copied, contents(tensor, datatype), datatype), data.hex()
    return True
