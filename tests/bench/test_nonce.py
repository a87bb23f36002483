"""The check of responses in the soak test is itself tested: by official protobuf, and by responses with one fault."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from bench import nonce
from bench.repository import SOAK
from inferd_client.driver import VERDICTS
from inferd_client.pb import grpc_service_pb2 as pb

MODELS = {model.name: model for model in SOAK}
FAULTLESS = nonce.NonceWorkload(SOAK, fault_fraction=0.0)


def raw_tensors(request: pb.ModelInferRequest) -> list[bytes]:
    """The payloads of a request, typed contents turned into raw ones."""
    if request.raw_input_contents:
        return list(request.raw_input_contents)
    tensors = []
    for tensor in request.inputs:
        ((_, elements),) = tensor.contents.ListFields()
        if tensor.datatype == "BYTES":
            tensors.append(b"".join(len(e).to_bytes(4, "little") + e for e in elements))
        elif tensor.datatype.startswith("FP"):
            # not through Python floats, which turn signalling NaNs into quiet ones
            size = len(elements) * int(tensor.datatype[2:]) // 8
            tensors.append(tensor.contents.SerializeToString()[-size:])
        else:
            dtype = "bool" if tensor.datatype == "BOOL" else tensor.datatype.lower()
            tensors.append(np.array(list(elements), dtype).tobytes())
    return tensors


def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """The response of an identity model."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    wanted = {output.name for output in request.outputs}
    for tensor, raw in zip(request.inputs, raw_tensors(request), strict=True):
        name = tensor.name.replace("INPUT", "OUTPUT")
        if not wanted or name in wanted:
            response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(raw)
    return response


def parse(workload: object, seed: int) -> pb.ModelInferRequest:
    return pb.ModelInferRequest.FromString(workload.request(seed))  # type: ignore[attr-defined]


def seeds(count: int) -> list[int]:
    source = random.Random(7)
    return [source.getrandbits(64) for _ in range(count)]


def test_requests_are_what_protobuf_reads_and_the_identity_answer_is_correct() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(2000):
        request = parse(FAULTLESS, seed)
        seen[request.model_name] += 1
        seen["raw" if request.raw_input_contents else "typed"] += 1
        assert FAULTLESS.verdict(seed, answer(request).SerializeToString()) == 0, request.model_name
    assert {*MODELS, "raw", "typed"} == set(seen)


@pytest.mark.parametrize("change", ["id", "model", "shape", "bytes", "outputs", "malformed"])
def test_an_answer_with_one_fault_is_wrong(change: str) -> None:
    caught = 0
    for seed in seeds(300):
        request = parse(FAULTLESS, seed)
        response = answer(request)
        if change == "id" and request.id:
            response.id = response.id[:-1]
        elif change == "model":
            response.model_name += "x"
        elif change == "shape":
            response.outputs[-1].shape[-1] += 1
        elif change == "bytes":
            raw = bytearray(response.raw_output_contents[-1])
            raw[-1] ^= 1
            response.raw_output_contents[-1] = bytes(raw)
        elif change == "outputs":
            response.outputs.add().CopyFrom(response.outputs[0])
        encoded = response.SerializeToString()
        verdict = FAULTLESS.verdict(seed, encoded[:-1] if change == "malformed" else encoded)
        if change == "id" and not request.id:
            assert verdict == 0
            continue
        assert VERDICTS[verdict] == change
        caught += 1
    assert caught > 200


def test_the_answer_to_another_request_is_wrong() -> None:
    numbers = seeds(300)
    for seed, other in itertools.pairwise(numbers):
        assert FAULTLESS.verdict(seed, answer(parse(FAULTLESS, other)).SerializeToString()) != 0


def test_requests_wrong_on_purpose_must_be_refused() -> None:
    workload = nonce.NonceWorkload(SOAK, fault_fraction=1.0)
    for seed in seeds(300):
        request = parse(workload, seed)
        expected = 5 if request.model_name == "nosuch" else 3
        assert workload.verdict(seed, b"", expected) == 0
        assert VERDICTS[workload.verdict(seed, b"", 13)] == "status"
