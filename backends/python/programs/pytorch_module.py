"""An nn.Module in a `model.py`, with its weights in a `.pt` beside it: Triton's Python-based runtime of PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from batches import Batches

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"


def check_cuda() -> None:
    """Check that PyTorch can use a GPU.

    Raises:
        TritonModelException: it cannot; the text says why.
    """
    if torch.cuda.is_available():
        return
    reason = "is built for the CPU" if torch.version.cuda is None else "finds no device"
    raise pb_utils.TritonModelException(
        f"the instance is of KIND_GPU, but PyTorch {torch.__version__} of {sys.executable} {reason}: install a build "
        f"for CUDA, as PyPI has it ({sys.executable} -m pip install --force-reinstall torch), or write kind: KIND_CPU"
    )


class TritonPythonModel:
    """Calls the module with a batch at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the module."""
        config = json.loads(args["model_config"])
        self._parameters = {key: each["string_value"] for key, each in config.get("parameters", {}).items()}
        self._config = config
        self._batches = Batches(config)
        self._inputs = [(each["name"], each["data_type"] == "TYPE_BF16") for each in config["input"]]
        self._outputs = [each["name"] for each in config["output"]]
        torch.set_num_threads(int(self._parameters.get("NUM_THREADS", "1")))
        torch.set_num_interop_threads(int(self._parameters.get("NUM_INTEROP_THREADS", "1")))
        kind, number = args["model_instance_kind"], args["model_instance_device_id"]
        if kind == "GPU":
            check_cuda()
        self._device = torch.device(f"cuda:{number}" if kind == "GPU" else "cpu")
        path = args["model_file"]
        module = self._make(path) if path.endswith(".py") else torch.jit.load(path, map_location=self._device)
        self._module = module.to(self._device).eval()
        if path.endswith(".py"):
            self._module = self._compiled(self._module)
        self._mode = torch.inference_mode()
        self._mode.__enter__()  # for this thread, which executes everything: entering it for each batch would be slow

    def _make(self, path: str) -> Any:
        module = module_class(import_file(path))()
        weights = path[: -len("py")] + "pt"
        if not os.path.exists(weights):  # noqa: PTH110 (as the rest of what runs in workers)
            pb_utils.Logger.log_info(f"there are no weights '{weights}': the module keeps those that it is made with")
            return module
        safely = self._parameters.get("WEIGHTS_ONLY", "true").strip().lower() not in ("false", "0", "no")
        try:
            state = torch.load(weights, map_location=self._device, weights_only=safely)
        except Exception as error:
            text = f"the weights '{weights}' cannot be loaded: {str(error).partition(chr(10))[0]}"
            if safely:
                text += "; a file of more than tensors, which can run any code, is loaded with WEIGHTS_ONLY false"
            raise pb_utils.TritonModelException(text) from error
        module.load_state_dict(state)
        return module

    def _compiled(self, module: Any) -> Any:
        text = self._parameters.get(COMPILE, "{}")
        options = json.loads(text)
        if options.get("disable"):
            return module
        inductor = options.get("backend", "inductor") == "inductor"
        compiler = os.environ.get("CXX", "g++")
        if inductor and self._device.type == "cpu" and not (shutil.which(compiler) or shutil.which("clang++")):
            pb_utils.Logger.log_warn(f"the module is not compiled, as there is no C++ compiler ({compiler})")
            return module
        try:
            return torch.compile(module, **options)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise pb_utils.TritonModelException(
                f"parameter '{COMPILE}' is '{text}', which torch.compile refuses: {reason}"
            ) from error

    def execute(self, requests: list[Any]) -> list[Any]:
        """Call the module once for the whole batch."""
        responses: list[Any] = self._batches.execute(requests, self._run)
        return responses

    def _run(self, group: list[Any]) -> list[Any]:
        arrays, rows = self._batches.gather(group)
        found = self._module(*[self._tensor(arrays, name, bits) for name, bits in self._inputs])
        results = found if isinstance(found, (tuple, list)) else [found]
        if len(results) < len(self._outputs):
            raise pb_utils.TritonModelException(
                f"the module returned {len(results)} tensors, but {len(self._outputs)} outputs are configured"
            )
        outputs = {name: _result(name, each) for name, each in zip(self._outputs, results)}
        responses: list[Any] = self._batches.scatter(group, rows, outputs)
        return responses

    def finalize(self) -> None:
        """Restore the thread's state."""
        self._mode.__exit__(None, None, None)

    def _tensor(self, arrays: dict[str, Any], name: str, bits: bool) -> Any:
        array = arrays.get(name)
        if array is None:  # an optional input that is left out
            return None
        tensor = torch.from_numpy(array.view("i2")).view(torch.bfloat16) if bits else torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _result(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise pb_utils.TritonModelException(f"output '{name}' must be a Tensor, the module returned {type(value)}")
    if value.requires_grad:
        value = value.detach()
    if value.is_cpu and value.dtype != torch.bfloat16 and not value.is_neg():
        return value.numpy()  # DLPack takes fifteen times as long
    return value.resolve_neg().contiguous()


def import_file(path: str) -> Any:
    """The module of a file, whose neighbours it can import."""
    folder = os.path.dirname(path)  # noqa: PTH120
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location("inferd_torch_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickled and compiled objects name the module
    spec.loader.exec_module(module)
    return module


def module_class(module: Any) -> Any:
    """The nn.Module that the file defines; of several the first by name, as in Triton.

    Raises:
        TritonModelException: there is none.
    """
    classes = [
        each for _, each in sorted(vars(module).items()) if isinstance(each, type) and issubclass(each, torch.nn.Module)
    ]
    own = [each for each in classes if each.__module__ == module.__name__]
    if not classes:
        raise pb_utils.TritonModelException(f"Cannot find a subclass of torch.nn.Module in '{module.__file__}'")
    if len(own) > 1:
        names = ", ".join(each.__name__ for each in own)
        pb_utils.Logger.log_warn(f"'{module.__file__}' defines {names}: the first of them is the model")
    return (own or classes)[0]
