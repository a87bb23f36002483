"""What requests may say in other ways, and what none may say."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.kind import written

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.simulation.clients import Call
    from tests.simulation.instances import Value

SMALL = 64  # numbers in a tensor that is written out
NOTES = ("n", 'say "no"', "back\\slash", "\n\x01", "Größe")
OURS = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
UNKNOWN_FIELD = b"\xa0\x06\x01"  # field 100, a varint
WRONG = ("model", "version", "datatype", "shape", "negative", "rank", "input", "none", "twice", "output", "more", "cut")


def reword(random: Random, call: Call, message: pb.ModelInferRequest) -> None:
    """Say the same in another way."""
    if call.region is None:
        if call.x.size <= SMALL and random.random() < 0.15:
            del message.raw_input_contents[:]
            contents, values = message.inputs[0].contents, call.x.reshape(-1).tolist()
            if call.kind.text:
                contents.bytes_contents.extend(map(written, values))
            else:
                contents.int64_contents.extend(values)
        if random.random() < 0.15:
            for name in call.kind.factors(call.question):
                message.outputs.add(name=name)
            if not (call.kind.text or call.kind.decoupled) and call.x.size <= SMALL and random.random() < 0.3:
                call.classes = random.choice((1, 2, 1000))
                message.outputs[0].parameters["classification"].int64_param = call.classes
    if random.random() < 0.1:
        message.model_version = "1"
    if random.random() < 0.1:
        message.parameters["note"].string_param = random.choice(NOTES) * random.randrange(40)
        message.parameters["share"].double_param = random.choice((0.5, 0.1, -1e300))
        message.parameters["known"].bool_param = random.random() < 0.5
        message.parameters["count"].int64_param = random.choice((0, -1 << 63, 12))


def serialized(random: Random, message: pb.ModelInferRequest) -> bytes:
    """The bytes of the message, perhaps with a field that comes from a later version of the protocol."""
    data = message.SerializeToString()
    if "note" in message.parameters and random.random() < 0.3:  # the one that comes last counts
        again = pb.ModelInferRequest()
        again.parameters["note"].string_param = message.parameters["note"].string_param = "again"
        data += again.SerializeToString()
    return data + UNKNOWN_FIELD if random.random() < 0.1 else data


def said_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Value]:
    """Parameters by name, but for those that the server itself reads."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in parameters.items()
        if key not in OURS and not key.startswith("triton_enable")
    }


def spoil(random: Random, message: pb.ModelInferRequest) -> bytes:
    """The bytes of a request that has to be refused, made of one that need not be."""
    what = random.choice(WRONG)
    if what == "cut" and not message.raw_input_contents:
        what = "none"  # what lies behind the inputs need not be there
    given = message.inputs[0]
    if what == "model":
        message.model_name = "nobody"
    elif what == "version":
        message.model_version = "7"
    elif what == "datatype":
        given.datatype = random.choice(("FP32", "INT32", "NOTHING", ""))
    elif what == "shape":
        given.shape[1] += random.randint(1, 1000)
    elif what == "negative":
        given.shape[0] = -given.shape[0]
    elif what == "rank":
        given.shape.append(1)
    elif what == "input":
        given.name = "z"
    elif what == "none":
        del message.inputs[:]
        del message.raw_input_contents[:]
    elif what == "twice":
        message.inputs.append(given)
        message.raw_input_contents.extend(list(message.raw_input_contents))
    elif what == "output":
        message.outputs.add(name="nothing")
    elif what == "more":
        message.raw_input_contents.append(b"12345678")
    data = message.SerializeToString()
    return data[: random.randint(1, len(data) - 1)] if what == "cut" else data
