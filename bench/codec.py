"""How long the codec takes: `python -m bench.codec` prints the table of bench/results/codec.md.

It runs the nogil functions alone, in a loop over one message: all data is in the first-level cache, and every branch is
predicted. The last column is the Python binding of official protobuf (upb) with the same bytes.
"""

import time

import numpy as np

from bench.codec_speed import contents_ns, decode_ns, encode_ns
from inferd.server.pb import grpc_service_pb2 as pb


def request(datatype: str, count: int, raw: bool) -> pb.ModelInferRequest:
    """One input of `count` zeros, raw or typed."""
    message = pb.ModelInferRequest(model_name="identity", id="1")
    tensor = message.inputs.add(name="INPUT0", datatype=datatype, shape=[1, count])
    if raw:
        message.raw_input_contents.append(bytes(count * 4))
    elif datatype == "FP32":
        tensor.contents.fp32_contents.extend(np.zeros(count))
    else:
        tensor.contents.int64_contents.extend(range(count))
    return message


def upb_ns(data: bytes) -> float:
    loops = 20_000 if len(data) < 10_000 else 500
    start = time.perf_counter_ns()
    for _ in range(loops):
        pb.ModelInferRequest.FromString(data)
    return (time.perf_counter_ns() - start) / loops


def main() -> None:
    small = request("FP32", 16, raw=True)
    full = request("FP32", 16, raw=True)
    full.outputs.add(name="OUTPUT0")
    full.parameters["priority"].int64_param = 1
    cases = {
        "raw FP32[1,16]": (small, None),
        "the same, one parameter, one requested output": (full, None),
        "raw FP32[1,150000]": (request("FP32", 150_000, raw=True), None),
        "typed FP32[1,1000]": (request("FP32", 1000, raw=False), "FP32"),
        "typed INT64[1,1000], 1 and 2 bytes each": (request("INT64", 1000, raw=False), "INT64"),
    }
    print("| request | bytes | decode, ns | copy of typed contents, ns | upb from Python, ns |\n|---|---|---|---|---|")
    for name, (message, datatype) in cases.items():
        data = message.SerializeToString()
        official = upb_ns(data)
        decode = min(decode_ns(data, 200_000) for _ in range(5))
        copy = f"{min(contents_ns(data, datatype, 20_000) for _ in range(5)):.0f}" if datatype else ""
        print(f"| {name} | {len(data)} | {decode:.0f} | {copy} | {official:.0f} |")
    print(f"\nResponse head with one output, sized and written, and a raw prefix: {encode_ns(2_000_000):.0f} ns")


if __name__ == "__main__":
    main()
