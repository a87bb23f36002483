"""Calls a server through KServe's InferenceGRPCClient, which has no metadata call and no stream.

python client.py HOST:PORT; prints one JSON object a line, see ../cases.py. It runs in a virtual environment of its own.
"""

import asyncio
import json
import logging
import sys

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

_GZIP = ("grpc.default_compression_algorithm", 2)


def show(case, **fields):
    print(json.dumps({"case": case, **fields}))


def request(model, datatype, values, request_id=None):
    tensor = InferInput("INPUT0", [1, len(values)], datatype)
    tensor.set_data_from_numpy(np.array([values], np.float32 if datatype == "FP32" else object), binary_data=True)
    return InferRequest(model_name=model, infer_inputs=[tensor], request_id=request_id)


def values(response):
    return response.outputs[0].as_numpy()[0].tolist()


async def failure(call):
    try:
        await call
    except grpc.RpcError as error:
        return {"code": error.code().value[0], "message": error.details()}
    return {"code": 0, "message": ""}


async def show_gzip(address):
    async with InferenceGRPCClient(address, channel_args=[_GZIP]) as client:
        received = []

        async def infer():
            response = await client.infer(request("simple", "FP32", [0.0] * 4096))
            received.append(response.outputs[0].as_numpy().nbytes)

        result = await failure(infer())
        show("gzip", **result, bytes=sum(received))


async def main(address):
    async with InferenceGRPCClient(address) as client:
        show(
            "ready",
            live=await client.is_server_live(),
            server=await client.is_server_ready(),
            model=await client.is_model_ready("simple"),
        )
        response = await client.infer(request("simple", "FP32", [1, 2.5, -3], "one"))
        show("fp32", id=response.id, values=values(response))
        response = await client.infer(request("strings", "BYTES", [b"", "snow \u2603".encode(), b"abc"]))
        show("bytes", values=[value.decode() for value in values(response)])
        show("error", **await failure(client.infer(request("nothing", "FP32", [1]))))
    await show_gzip(address)


if __name__ == "__main__":
    logging.disable()  # the client logs each failure with its traceback
    asyncio.run(main(sys.argv[1]))
