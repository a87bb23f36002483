"""A TensorRT without a GPU: the names of version 10, numpy in place of kernels, on the streams of the stub driver.

It is imported as `tests.fakes.tensorrt`, and as `tensorrt` where `tests/fakes` is on the path. A plan is a text that
`plan()` makes: tensors, profiles, and the name of a function of `programs`. What it promises is what TensorRT promises:

- work runs when its stream comes to it, and reads addresses and shapes as they were when it was submitted;
- a shape that data decide is told when the work has run, not before (upstream says "sometime");
- without a driver the process dies at the first `Runtime`, as it does with the real one;
- what is wrong is told to the logger, and the call returns None or False.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from inferd._native.cuda import driver
from inferd._native.cuda.device import device
from tests import gpu_stub
from tests.fakes.tensorrt.building import (
    Builder,
    BuilderFlag,
    HardwareCompatibilityLevel,
    IProgressMonitor,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParser,
)
from tests.fakes.tensorrt.programs import PROGRAMS

__all__ = [
    "Builder",
    "BuilderFlag",
    "HardwareCompatibilityLevel",
    "IProgressMonitor",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "plan",
    "tensor",
]

__version__ = "10.16.1.11"


class DataType(Enum):
    FLOAT = "f4"
    HALF = "f2"
    BF16 = "u2"
    INT8 = "i1"
    UINT8 = "u1"
    INT32 = "i4"
    INT64 = "i8"
    BOOL = "?"
    FP8 = "|u1"
    INT4 = "int4"


class TensorIOMode(Enum):
    INPUT = 1
    OUTPUT = 2


class TensorLocation(Enum):
    DEVICE = 0
    HOST = 1


class TensorFormat(Enum):
    LINEAR = 0
    CHW4 = 3


class ExecutionContextAllocationStrategy(Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger:
    class Severity(Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    pass


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return True


def tensor(name: str, dtype: str, dims: Sequence[int], **more: object) -> dict[str, object]:
    """One for `plan`; `is_shape` and `format` as further arguments."""
    return {"name": name, "dtype": dtype, "dims": list(dims), **more}


def plan(
    program: str,
    inputs: Sequence[dict[str, object]],
    outputs: Sequence[dict[str, object]],
    profiles: Sequence[dict[str, Sequence[Sequence[int]]]] = (),
    **more: object,
) -> bytes:
    """A plan; each profile says the least, best and greatest of every input that varies or is a shape tensor."""
    found = {"inputs": inputs, "outputs": outputs, "profiles": list(profiles) or [{}], "program": program}
    return json.dumps({"fake plan": __version__, "capability": [9, 0], "weights": 0, **found, **more}).encode()


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        if not driver.is_loaded():
            os.kill(os.getpid(), signal.SIGSEGV)
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, data: Any) -> ICudaEngine | None:
        try:
            content = json.loads(bytes(data))
        except ValueError:
            return self._refuse("Serialization assertion magic_tag_read == kMAGIC_TAG failed.")
        if content["fake plan"] != __version__:
            return self._refuse(
                f"The engine plan file is not compatible with this version of TensorRT, expecting library version "
                f"{__version__} got {content['fake plan']}, please rebuild."
            )
        if tuple(content["capability"]) != device(0).compute_capability:
            return self._refuse("The engine plan file is generated on an incompatible device, please rebuild.")
        if content.get("host_code") and not self.engine_host_code_allowed:
            return self._refuse("The engine contains host code, which engineHostCodeAllowed does not allow.")
        return ICudaEngine(self.logger, content)

    def _refuse(self, text: str) -> None:
        self.logger.log(ILogger.Severity.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: {text}")


class ICudaEngine:
    def __init__(self, logger: ILogger, content: dict[str, Any]) -> None:
        self.logger = logger
        self.content = content
        self.tensors = {each["name"]: each for each in (*content["inputs"], *content["outputs"])}
        self.input_names = [each["name"] for each in content["inputs"]]
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(content["profiles"])
        self.streamable_weights_size = content["weights"]
        self.weight_streaming_budget_v2 = content["weights"]

    def get_weight_streaming_automatic_budget(self) -> int:
        return self.streamable_weights_size // 4

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.input_names else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["dims"])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.is_shape_inference_io(name) else TensorLocation.DEVICE

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self.tensors[name].get("format", "LINEAR")]

    def get_tensor_format_desc(self, name: str) -> str:
        return f"{self.get_tensor_format(name).name} format"

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self.tensors[name].get("is_shape"))

    def _range(self, name: str, index: int) -> list[tuple[int, ...]]:
        fixed = [self.tensors[name]["dims"]] * 3
        return [tuple(each) for each in self.content["profiles"][index].get(name, fixed)]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return self._range(name, profile_index)

    def get_tensor_profile_values(self, index: int, name: str) -> list[list[int]]:
        assert self.is_shape_inference_io(name)
        return [list(each) for each in self._range(name, index)]

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext:
        return IExecutionContext(self, strategy)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine = engine
        self.strategy = strategy
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.program = PROGRAMS[engine.content["program"]]

    def _fail(self, text: str) -> bool:
        self.engine.logger.log(ILogger.Severity.ERROR, f"IExecutionContext: Error Code 3: {text}")
        return False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        return stream_handle != 0

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        least, _, greatest = self.engine._range(name, self.profile)
        if len(shape) != len(least) or not all(
            low <= dim <= high for low, dim, high in zip(least, shape, greatest, strict=True)
        ):
            return self._fail(f"input {name}: the shape {list(shape)} does not satisfy profile {self.profile}")
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory == 0 or memory % 256:
            return self._fail(f"the address of {name} is no multiple of 256")
        self.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert name not in self.allocators, "the real bindings keep every one that is set, for good"
        self.allocators[name] = output_allocator
        return True

    def _dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(self.engine.get_tensor_dtype(name).value)

    def _values(self) -> dict[str, np.ndarray]:
        """The values of the shape tensors, which lie in the host's memory."""
        import ctypes

        found = {}
        for name in filter(self.engine.is_shape_inference_io, self.engine.input_names):
            dtype, dims = self._dtype(name), self.engine.get_tensor_shape(name)
            size = int(np.prod(dims)) * dtype.itemsize
            found[name] = np.frombuffer(ctypes.string_at(self.addresses[name], size), dtype)
        return found

    def _missing(self) -> list[str]:
        shape = self.engine.is_shape_inference_io
        return [
            name for name in self.engine.input_names if name not in (self.addresses if shape(name) else self.shapes)
        ]

    def infer_shapes(self) -> list[str]:
        missing = self._missing()
        if not missing:
            self.program.shapes(self.shapes, self._values())
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        return tuple(self.program.shapes(self.shapes, self._values())[name])

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.engine.content.get("broken"):
            return self._fail("Cask convolution execution")
        if missing := self._missing():
            return self._fail(f"{', '.join(missing)} are not specified")
        return Execution(self, stream_handle).launch()


class Execution:
    """One execution, with everything as it is when it is submitted."""

    def __init__(self, context: IExecutionContext, stream: int) -> None:
        self.context = context
        self.stream = stream
        self.stub = gpu_stub.load()
        self.values = context._values()
        self.inputs = {name: (context.addresses[name], context.shapes[name]) for name in context.shapes}
        self.outputs = context.program.shapes(context.shapes, self.values)
        self.addresses = dict(context.addresses)

    def launch(self) -> bool:
        context, engine = self.context, self.context.engine
        for name, dims in self.outputs.items():
            if -1 in dims:
                size = context.program.bound(context.shapes) * context._dtype(name).itemsize
                self.addresses[name] = context.allocators[name].reallocate_output_async(
                    name, 0, max(1, size), 256, self.stream
                )
                if not self.addresses[name]:
                    return context._fail(f"no memory for {name}")
            elif engine.is_shape_inference_io(name):
                self._write_host(name, context.program.host(self.values, context.shapes)[name])
        touched = [(address, self._size(name, shape), False) for name, (address, shape) in self.inputs.items()]
        for name, dims in self.outputs.items():
            if not engine.is_shape_inference_io(name):
                shape = (context.program.bound(context.shapes),) if -1 in dims else dims
                touched.append((self.addresses[name], self._size(name, shape), True))
        return self.stub.launch(self.stream, self.run, touched) == 0

    def _size(self, name: str, shape: Sequence[int]) -> int:
        return int(np.prod(shape, dtype=np.int64)) * self.context._dtype(name).itemsize

    def _write_host(self, name: str, values: np.ndarray) -> None:
        import ctypes

        data = values.astype(self.context._dtype(name)).tobytes()
        ctypes.memmove(self.addresses[name], data, len(data))

    def run(self) -> None:
        arrays = {}
        for name, (address, shape) in self.inputs.items():
            memory = self.stub.array(address, self._size(name, shape)) if self._size(name, shape) else b""
            arrays[name] = np.frombuffer(memory, self.context._dtype(name)).reshape(shape)
        for name, array in self.context.program.compute(arrays, self.values).items():
            dtype = self.context._dtype(name)
            if -1 in self.outputs[name]:
                self.context.allocators[name].notify_shape(name, array.shape)
            if array.size:
                self.stub.write(self.addresses[name], np.ascontiguousarray(array, dtype).tobytes())
