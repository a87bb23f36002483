"""What requests may say in other ways, and what none may say."""

from __future__ import annotations

import struct
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message

from inferd_client.pb import grpc_service_pb2 as pb
from tests.native.official import check
from tests.simulation.kind import written
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.simulation.clients import Call
    from tests.simulation.instances import Value

SHORT = 2000  # bytes of a message that is decoded here, too
SMALL = 64  # numbers in a tensor that is written out
NOTES = ("n", 'say "no"', "back\\slash", "\n\x01", "Größe")
OURS = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
UNKNOWN_FIELD = b"\xa0\x06\x01"  # field 100, a varint
STRAYS = 1 << 40  # ids of sequences that nobody has begun
DEEPEST = 100  # groups, one in another, that a message may have
SAME = (  # parameters that are told apart, although they are much alike
    ("string_param", "1"),
    ("string_param", "2"),
    ("int64_param", 1),
    ("int64_param", 2),
    ("bool_param", True),
    ("bool_param", False),
    ("double_param", 1.5),
    ("double_param", -1.5),
)
WRONG = (
    "model",
    "version",
    "datatype",
    "shape",
    "negative",
    "rank",
    "input",
    "none",
    "twice",
    "output",
    "more",
    "contents",
    "cut",
    "deep",
    "parameter",
    "parameter",
    "parameter",
    "classes",
)

NO_VERSION = "invalid model version specified: '{}', version should be an integral value > 0"
NO_NUMBER = "failed to get model version from specified version string '{}' (details: stol)"
VERSIONS = (
    ("7", ""),
    ("7", ""),
    ("0", NO_VERSION.format("0")),
    ("-2", NO_VERSION.format("-2")),
    *((version, NO_NUMBER.format(version)) for version in ("one", "1.0", "-", "1" * 19, " 1")),
)
MOST_SHOWN = 256  # bytes of a text that a client chose
TRITON = "keys starting with 'triton_' are reserved for Triton usage and should not be specified, got 'triton_x'"
# by the name of a parameter, values that it may not have, and what is expected
MALFORMED: tuple[tuple[str, dict[str, object], str], ...] = (
    ("sequence_id", {"bool_param": True}, "int64_param or string_param"),
    ("sequence_id", {"double_param": 1.0}, "int64_param or string_param"),
    ("sequence_start", {"int64_param": 1}, "bool_param"),
    ("sequence_end", {"string_param": "true"}, "bool_param"),
    ("priority", {"int64_param": -1}, "int64_param >= 0 or uint64_param"),
    ("priority", {"string_param": "1"}, "int64_param >= 0 or uint64_param"),
    ("timeout", {"uint64_param": 1}, "int64_param"),
    ("timeout", {"bool_param": True}, "int64_param"),
    ("triton_enable_empty_final_response", {"int64_param": 1}, "bool_param"),
    ("odd", {"uint64_param": 1}, "int64_param, bool_param, or string_param"),
    ("odd", {}, "int64_param, bool_param, or string_param"),
    ("triton_x", {"bool_param": True}, TRITON),
    ("sequence_id", {"string_param": "s" * 4097}, "'sequence_id' parameter: expected a text of at most 4096 bytes"),
)


REGION, COUNT = {"string_param": "nowhere"}, {"int64_param": 8}
NO_TYPE = "invalid value type for 'shared_memory_{}' parameter for tensor '{{}}', expected {}."
NO_REGION = "'shared_memory_{}' can not be specified without 'shared_memory_region' parameter for tensor '{{}}'"
# parameters of a tensor that begin with shared_memory_, and what is said of them
MISPLACED: tuple[tuple[dict[str, dict[str, object]], str], ...] = (
    ({"offset": COUNT}, NO_REGION.format("offset")),
    ({"byte_size": COUNT}, NO_REGION.format("byte_size")),
    ({"region": COUNT, "byte_size": COUNT}, NO_TYPE.format("region", "string_param")),
    ({"region": REGION, "offset": REGION, "byte_size": COUNT}, NO_TYPE.format("offset", "int64_param")),
    ({"region": REGION, "byte_size": {"bool_param": True}}, NO_TYPE.format("byte_size", "int64_param")),
    (
        {"region": REGION, "offset": COUNT},
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor '{}'",
    ),
    ({"thing": COUNT}, "tensor '{}' has a parameter that begins with 'shared_memory_' and is not known"),
    ({"region": REGION, "byte_size": COUNT}, "Unable to find shared memory region: 'nowhere'"),
)


def reword(random: Random, call: Call, message: pb.ModelInferRequest) -> None:
    """Say the same in another way."""
    if call.region is None:
        can_write = (
            not call.kind.shaped
            and call.x.size <= SMALL
            and (call.given is None or bool(call.kind.beside and call.kind.beside.field))
        )
        if can_write and random.random() < 0.15:
            del message.raw_input_contents[:]
            contents, values = x_of(message).contents, call.x.reshape(-1).tolist()
            if call.kind.beside is not None:
                call.kind.beside.write_out(message, call.given)
            if call.kind.text:
                contents.bytes_contents.extend(map(written, values))
            else:
                getattr(contents, call.kind.contents).extend(call.kind.typed(call.x).reshape(-1).tolist())
        if random.random() < 0.15:
            names = call.kind.outputs(call.question)
            if len(names) > 1 and random.random() < 0.5:
                names = random.sample(names, random.randint(1, len(names)))
            if call.kind.decoupled and "y" not in names:  # it says which row an answer is for
                names.append("y")
            for name in names:
                message.outputs.add(name=name)
            if (
                not (names[0] != "y" or call.kind.flat or not call.kind.classifies)
                and call.x.size <= SMALL
                and random.random() < 0.3
            ):
                call.classes = random.choice((1, 2, 1000))
                message.outputs[0].parameters["classification"].int64_param = call.classes
    if random.random() < 0.1:
        message.model_version = "1"
    if call.kind.reuses:  # there are few different requests of each question
        message.MergeFrom(noted(random))
    elif random.random() < 0.1:
        message.parameters["note"].string_param = random.choice(NOTES) * random.randrange(40)
        message.parameters["share"].double_param = random.choice((0.5, 0.1, -1e300))
        message.parameters["known"].bool_param = random.random() < 0.5
        message.parameters["count"].int64_param = random.choice((0, -1 << 63, 12))
    if "priority" in message.parameters and random.random() < 0.3:
        message.parameters["priority"].uint64_param = call.asked_level
    if "timeout" not in message.parameters and random.random() < 0.03:
        message.parameters["timeout"].int64_param = -5  # none


def noted(random: Random) -> pb.ModelInferRequest:
    """Some parameters, of few values: those of two requests often differ in one alone, or in none."""
    said = pb.ModelInferRequest()
    for name in ("note", "share"):
        if random.random() < 0.15:
            field, value = random.choice(SAME[:5] if name == "note" else SAME[3:])
            setattr(said.parameters[name], field, value)
    return said


def serialized(random: Random, message: pb.ModelInferRequest) -> bytes:
    """The bytes of the message, perhaps with a field that comes from a later version of the protocol."""
    data = encoded(message)
    if len(message.inputs) == 1 and message.inputs[0].contents.fp64_contents and random.random() < 0.5:
        data = singly(message)
    if message.parameters and random.random() < 0.2:
        data = malformed_before(random, message) + data
    if "note" in message.parameters and random.random() < 0.3:  # the one that comes last counts
        again = pb.ModelInferRequest()
        again.parameters["note"].string_param = message.parameters["note"].string_param = "again"
        data += encoded(again)
    return data + random.choice((UNKNOWN_FIELD, nested(DEEPEST))) if random.random() < 0.1 else data


def malformed_before(random: Random, message: pb.ModelInferRequest) -> bytes:
    """The bytes of parameters that are malformed, which does not matter, for each comes again behind."""
    first = pb.ModelInferRequest()
    for key in random.sample(sorted(message.parameters), min(2, len(message.parameters))):
        if random.random() < 0.5:
            first.parameters[key].double_param = 0.5 if key in OURS else float("nan")
        if key not in ("share", *OURS) and random.random() < 0.5:
            first.parameters[key].uint64_param = 7
        elif key not in OURS:
            first.parameters[key].CopyFrom(pb.InferParameter())
    return encoded(first)


def agree(data: bytes) -> None:
    """Check that the server's decoder reads of a small message what protobuf reads.

    Raises:
        Violation: it reads something else.
    """
    if len(data) > SHORT:
        return
    try:
        check(data)
    except AssertionError as error:
        raise Violation(f"{data.hex()} is decoded as something else: {error}") from error


def singly(message: pb.ModelInferRequest) -> bytes:
    """The bytes of a message with numbers of FP64, each of which has a tag of its own, in two parts."""
    rest = pb.ModelInferRequest()
    rest.CopyFrom(message)
    del rest.inputs[:]
    given = pb.ModelInferRequest.InferInputTensor()
    given.CopyFrom(message.inputs[0])
    given.ClearField("contents")
    numbers = [b"\x39" + struct.pack("<d", each) for each in message.inputs[0].contents.fp64_contents]
    half = len(numbers) // 2
    parts = b"".join(delimited(5, b"".join(part)) for part in (numbers[:half], numbers[half:]))
    return encoded(rest) + delimited(5, encoded(given) + parts)


def encoded(message: Message) -> bytes:
    """The bytes of a message, which are the same in each run: else a map has its keys in an order by chance."""
    return message.SerializeToString(deterministic=True)


def delimited(field: int, content: bytes) -> bytes:
    """A field of this number with this content."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + content


def said_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Value]:
    """Parameters by name, but for those that the server itself reads."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in sorted(parameters.items(), key=itemgetter(0))
        if key not in OURS and not key.startswith("triton_enable")
    }


def nested(depth: int) -> bytes:
    """An unknown field: so many groups, one in another."""
    return b"\xa3\x06" * depth + b"\xa4\x06" * depth


def spoil(random: Random, call: Call, message: pb.ModelInferRequest) -> tuple[bytes, str]:
    """The bytes of a request that has to be refused, made of one that need not be; and what the refusal has to say."""
    what = random.choice(WRONG)
    is_raw = bool(message.raw_input_contents)
    beside = call.kind.beside
    misplaced = Random(f"{call.number} misplaced")
    if misplaced.random() < 0.3 and call.region is None:
        told = misplace(misplaced, call, message)
        return encoded(message), told
    if beside is not None and random.random() < 0.5:
        told = beside.spoil(random, call.kind.name, 0 if call.kind.flat else call.kind.rows, message)
        if told:
            return encoded(message), told
    if what == "cut" and not is_raw:
        what = "none"  # what lies behind the inputs need not be there
    if beside is not None and (what == "none" or (what == "contents" and call.given and not beside.field)):
        what = "rank"
    given, model, rows = x_of(message), f"model '{call.kind.name}'", len(call.x)
    text = f"input 'x' for {model}"
    if what == "model":
        message.model_name = random.choice(("nobody", "größe" * 43, "\U0001f600n" * 70))
        text = f"unknown model: '{clipped(message.model_name)}'"
    elif what == "version":
        message.model_version, text = random.choice(VERSIONS)
        text = text or f"unknown model: '{call.kind.name}' version 7 is not found"
    elif what == "datatype":
        others = [name for name in ("FP32", "INT32", "NOTHING", "") if name != call.kind.datatype]
        given.datatype = random.choice(others)
        text = f"input 'x' data-type is '{given.datatype}', but {model} expects '{call.kind.datatype}'"
    elif what == "shape":
        given.shape[1] += random.randint(1, 1000)
    elif what == "negative":
        given.shape[0] = -given.shape[0]
        text = f"All input dimensions should be specified for {text}, got {-rows} in dimension 0"
    elif what == "rank":
        given.shape.append(1)
        note = "" if call.kind.flat else " NOTE: max_batch_size"
        text = f"unexpected shape for {text}. Expected [-1,-1], got [{rows},{call.x.shape[1]},1].{note}"
    elif what == "input":
        given.name = "z"
        text = f"unexpected inference input 'z' for {model}"
    elif what == "none":
        del message.inputs[:]
        del message.raw_input_contents[:]
        text = f"expected 1 inputs but got 0 inputs for {model}. Got input(s) [], but missing required input(s) ['x']."
    elif what == "twice":
        if is_raw:
            message.raw_input_contents.append(message.raw_input_contents[list(message.inputs).index(given)])
        message.inputs.append(given)
        text = "input 'x' already exists in request"
    elif what == "output":
        message.outputs.add(name="nothing")
        text = f"unexpected inference output 'nothing' for {model}"
    elif what == "more":
        message.raw_input_contents.append(b"12345678")
        text = f"for {model}"
    elif what == "parameter":
        text = malform(random, message)
    elif what == "classes":
        if not message.outputs:
            message.outputs.add(name="y")
        asked = message.outputs[0].parameters["classification"]
        if random.random() < 0.5:
            asked.bool_param = True
            text = "invalid value type for 'classification' parameter, expected int64_param"
        else:
            asked.int64_param = random.choice((0, -3, -1 << 63))
            text = f"invalid value for 'classification' parameter, expected value >= 1, got {asked.int64_param}"
    elif what == "contents":
        del message.raw_input_contents[:]
        if is_raw and beside is not None:
            beside.write_out(message, call.given)
        text = (
            f"unexpected explicit tensor data for input tensor 'x' for {model}, expected {_other(random, call, given)}"
        )
    data = encoded(message)
    if what == "cut":
        data = data[: random.randint(1, len(data) - 1)]
        if _is_message(data):  # cut between two fields: what the rest lacks is one of several things
            return data, ""
    elif what == "deep":
        data += nested(DEEPEST + 1)
    else:
        return data, text
    return data, f"is not a valid inference.ModelInferRequest message of {len(data)} bytes"


def lead_astray(random: Random, call: Call, message: pb.ModelInferRequest) -> str:
    """Have a request that is of no sequence name one in a wrong way, or none; what its refusal says."""
    kind, said = call.kind, message.parameters
    assert kind.sequence is not None
    what = random.choice(("none", "unknown", "unknown", "type"))
    if kind.sequence.direct and len(call.x) > 1:
        said["sequence_id"].int64_param = 1
        return "must specify batch-size 1 due to requirements of sequence batcher"
    if what == "none":
        if random.random() < 0.5:
            said["sequence_id"].string_param = ""
        return "must specify a non-zero or non-empty correlation ID"
    is_text = kind.named != (what == "type")
    number = STRAYS + call.number
    if is_text:
        said["sequence_id"].string_param = str(number)
    else:
        said["sequence_id"].int64_param = number
    if what == "type":
        said["sequence_start"].bool_param = True
        names = ("BYTES", "UINT64") if is_text else ("UINT64", "BYTES")
        return f"control 'corrid' data-type is '{names[0]}', but model '{kind.name}' expects '{names[1]}'"
    return f"for sequence {number} to model '{kind.name}' must specify the START flag on the first request"


def misplace(random: Random, call: Call, message: pb.ModelInferRequest) -> str:
    """Have a tensor name a region in a wrong way; what the refusal says."""
    values, text = random.choice(MISPLACED)
    tensor: Any = x_of(message)
    if random.random() < 0.4 and not message.outputs:
        tensor = message.outputs.add(name="y")
    for key, value in values.items():
        tensor.parameters[f"shared_memory_{key}"].CopyFrom(pb.InferParameter(**value))  # type: ignore[arg-type]
    if tensor.name == "y" and random.random() < 0.2 and call.kind.classifies and len(values) == 1:
        tensor.parameters["classification"].int64_param = 1
    return text.format(tensor.name)


def clipped(text: str) -> str:
    """As much of a text that a client chose as the server shows: whole characters."""
    return text.encode()[:MOST_SHOWN].decode(errors="ignore")


def malform(random: Random, message: pb.ModelInferRequest) -> str:
    """Give one parameter a value that it may not have; what the refusal says."""
    key, value, text = random.choice(MALFORMED)
    message.parameters[key].CopyFrom(pb.InferParameter(**value))  # type: ignore[arg-type]
    if len(text) > 45:
        return text
    return f"invalid value type for '{key}' parameter, expected {text}"


def x_of(message: pb.ModelInferRequest) -> pb.ModelInferRequest.InferInputTensor:
    """The input that every request has."""
    return next(each for each in message.inputs if each.name == "x")


def _is_message(data: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    return True


def _other(random: Random, call: Call, given: pb.ModelInferRequest.InferInputTensor) -> str:
    """Give the numbers, or some of them, in a field for other ones; the name of the right field."""
    contents, values = given.contents, call.x.reshape(-1).tolist()
    right = call.kind.contents.removesuffix("_contents")
    if random.random() < 0.3 and call.x.size <= SMALL and not call.kind.text:
        getattr(contents, call.kind.contents).extend(call.kind.typed(call.x).reshape(-1).tolist())
    made = {"bool": [True], "int": [-3], "int64": [3], "uint": [3], "uint64": [3], "fp32": [0.5], "fp64": [0.5]}
    made["bytes"] = [b"three"]
    field = random.choice([field for field in made if field != right])
    getattr(contents, f"{field}_contents").extend(made[field] * random.choice((1, len(values))))
    return f"{right}_contents"
