"""A client that shares its memory with the server: both write and read tensors in place, and send none.

    python client.py unix:/tmp/inferd.sock [--size BYTES] [--count N]

It calls the model `echo` with a tensor and its response in one region of shared memory, then with the same tensor on
the wire, and prints the time of a request.
"""

import argparse
import os
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import tritonclient.grpc as triton

MODEL = "echo"


def ask_in_place(client: triton.InferenceServerClient, memory: SharedMemory, size: int) -> Callable[[], np.ndarray]:
    """The request with both tensors in the object: the first `size` bytes of it, and the next."""
    given = triton.InferInput("INPUT0", [size // 4], "FP32")
    given.set_shared_memory(memory.name, size)
    wanted = triton.InferRequestedOutput("OUTPUT0")
    wanted.set_shared_memory(memory.name, size, offset=size)
    answer = np.ndarray(size // 4, np.float32, memory.buf, offset=size)

    def ask() -> np.ndarray:
        client.infer(MODEL, [given], outputs=[wanted])
        return answer

    return ask


def ask_on_the_wire(client: triton.InferenceServerClient, tensor: np.ndarray) -> Callable[[], np.ndarray]:
    """The same request with its tensors in messages."""

    def ask() -> np.ndarray:
        given = triton.InferInput("INPUT0", list(tensor.shape), "FP32")
        given.set_data_from_numpy(tensor)  # the copy that every new tensor costs
        return client.infer(MODEL, [given]).as_numpy("OUTPUT0")

    return ask


def microseconds(ask: Callable[[], np.ndarray], expected: np.ndarray, count: int) -> float:
    """The mean time of a request."""
    np.testing.assert_array_equal(ask(), expected)
    begin = time.perf_counter()
    for _ in range(count):
        ask()
    return (time.perf_counter() - begin) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("address")
    parser.add_argument("--size", type=int, default=16 << 20, help="bytes of the tensor, a multiple of 64")
    parser.add_argument("--count", type=int, default=50, help="requests of each kind")
    arguments = parser.parse_args()
    size = arguments.size
    memory = SharedMemory(f"inferd-example-{os.getpid()}", create=True, size=2 * size)
    with triton.InferenceServerClient(arguments.address) as client:
        # as long as this connection lives: nothing is left if the program is killed
        client.register_system_shared_memory(
            memory.name, f"/{memory.name}", 2 * size, headers={"inferd-shm-lifetime": "connection"}
        )
        try:
            tensor = np.ndarray(size // 4, np.float32, memory.buf)
            tensor[:] = np.arange(size // 4)
            in_place = microseconds(ask_in_place(client, memory, size), tensor, arguments.count)
            on_the_wire = microseconds(ask_on_the_wire(client, tensor), tensor, arguments.count)
            print(f"{size} bytes there and back: {in_place:.0f} us in shared memory, {on_the_wire:.0f} us on the wire")
            del tensor
        finally:
            client.unregister_system_shared_memory(memory.name)
            memory.unlink()


if __name__ == "__main__":
    main()
