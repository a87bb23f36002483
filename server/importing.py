"""Models of other servers for `inferd models init`: archives of TorchServe, settings of MLServer.

Each becomes a `model.py` that a user can read and change, beside the files of the model.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from inferd.server.engine.config.tensors import TYPE_OF
from inferd.server.errors import InvalidArgument
from inferd_client.pb import model_config_pb2 as pb

MANIFEST = "MAR-INF/MANIFEST.json"
SETTINGS = "model-settings.json"
MOST_BYTES = 64 << 30  # of an unpacked archive


@dataclass(frozen=True, slots=True)
class Imported:
    """A model of another server.

    Attributes:
        name: the model's name there.
        config: its configuration here, as far as it is known.
        hint: what the user should know.
        put: writes the model's files into the folder of a version.
    """

    name: str
    config: pb.ModelConfig
    hint: str
    put: Callable[[Path], None]


def imported(file: Path) -> Imported | None:
    """The model that a file of another server describes; None: the file is of no other server.

    Raises:
        InvalidArgument: the file cannot be read, or needs something unknown.
    """
    if file.is_dir() and (file / SETTINGS).is_file():
        file = file / SETTINGS
    if file.name == SETTINGS:
        return _of_mlserver(file)
    return _of_torchserve(file) if file.suffix.lower() == ".mar" and file.is_file() else None


# ---- TorchServe -----------------------------------------------------------------------------------------------------

BUILT_IN = {
    "image_classifier": "ImageClassifier",
    "image_segmenter": "ImageSegmenter",
    "object_detector": "ObjectDetector",
    "text_classifier": "TextClassifier",
}
"""TorchServe's own handlers: modules of ts.torch_handler, and their classes."""
TORCHSERVE = '''"""Made by `inferd models init {file}`: runs the handler of the TorchServe model {name!r}.

A request's `data` is what TorchServe's client posts: a picture, a text, a JSON document. `response` is what the
handler answers: text as it is, anything else as JSON.
"""

import inspect
import json
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

MANIFEST = {manifest}


class Context:
    """What handlers ask of TorchServe's context."""

    def __init__(self, folder, gpu):
        self.manifest = MANIFEST
        self.system_properties = {{"model_dir": str(folder), "gpu_id": gpu, "batch_size": 1, "server_name": "inferd"}}
        self.model_yaml_config = {{}}
        self.metrics = None

    def get_request_id(self, index=0):
        return str(index)

    def get_request_header(self, index, key):
        return None


def make_handler(context):
    """The function that answers a list of requests."""
    {imports}
    {found}
    if inspect.isfunction(handler):
        handler(None, context)  # TorchServe's first call, which loads the model
        return handler
    served = handler()
    served.initialize(context)
    return served.handle


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        sys.path.insert(0, str(folder))
        gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        self.context = Context(folder, gpu)
        self.handle = make_handler(self.context)

    def execute(self, requests):
        rows, counts = [], []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "data").as_numpy()
            counts.append(len(data))
            rows += [{{"data": row.ravel()[0], "body": row.ravel()[0]}} for row in data]
        answers = self.handle(rows, self.context)
        if len(answers) != len(rows):
            raise pb_utils.TritonModelException(f"the handler gave {{len(answers)}} answers to {{len(rows)}} requests")
        responses = []
        for count in counts:
            mine, answers = answers[:count], answers[count:]
            tensor = np.array([[as_bytes(answer)] for answer in mine], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("response", tensor)]))
        return responses


def as_bytes(answer):
    if isinstance(answer, (bytes, bytearray)):
        return bytes(answer)
    return (answer if isinstance(answer, str) else json.dumps(answer)).encode()
'''


def _of_torchserve(file: Path) -> Imported:
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            names = [each for each in archive.infolist() if not each.is_dir()]
        model = manifest["model"]
        name, handler = str(model["modelName"]), str(model["handler"])
    except (KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise InvalidArgument(f"{file}: this is no archive of TorchServe with {MANIFEST}: {error}") from None
    for each in names:
        parts = PurePosixPath(each.filename)
        if parts.is_absolute() or ".." in parts.parts:
            raise InvalidArgument(f"{file}: it has {each.filename!r}, which lies outside of the archive")
    if sum(each.file_size for each in names) > MOST_BYTES:
        raise InvalidArgument(f"{file}: its files have more than {MOST_BYTES >> 30} GiB")
    module, _, function = handler.removesuffix(".py").partition(":")
    module = module.removesuffix(".py")
    if module in BUILT_IN:
        imports = f"from ts.torch_handler.{module} import {BUILT_IN[module]} as handler  # pip install torchserve"
        found = ""
        hint = "The handler is TorchServe's own: the model's environment needs the package torchserve."
    elif not module.isidentifier() or f"{module}.py" not in {each.filename for each in names}:
        raise InvalidArgument(f"{file}: its handler {handler!r} is neither in the archive nor one of TorchServe's")
    else:
        imports = f"import {module}"
        found = f"handler = {module}.{function}" if function else _FOUND.format(module=module)
        hint = "The handler is the archive's: what it imports, such as ts of torchserve, the model's environment needs."
    text = TORCHSERVE.format(file=file.name, name=name, manifest=_literal(manifest), imports=imports, found=found)
    text = text.replace("    \n", "")

    def put(folder: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder, [each.filename for each in names if each.filename != MANIFEST])
        if (folder / "model.py").exists():
            raise InvalidArgument(
                f"{file}: it has a model.py, which is the name of the file that is made: rename it there"
            )
        (folder / "model.py").write_text(text)

    config = pb.ModelConfig(max_batch_size=8)
    config.input.add(name="data", data_type=pb.TYPE_STRING, dims=[1])
    config.output.add(name="response", data_type=pb.TYPE_STRING, dims=[1])
    return Imported(name, config, hint, put)


def _literal(value: Any) -> str:
    """The value as Python text, with one field a line."""
    from pprint import pformat

    return pformat(value, width=100, sort_dicts=False)


_FOUND = """# as TorchServe looks for it: a function `handle`, else the class that has a method of that name
    handler = getattr({module}, "handle", None) or next(
        each
        for each in vars({module}).values()
        if inspect.isclass(each) and each.__module__ == {module}.__name__ and hasattr(each, "handle")
    )"""

# ---- MLServer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime of MLServer.

    Attributes:
        files: the names that it looks for in the model's folder.
        load: a Python expression that makes the model of `path`.
        predict: a Python expression that makes the response of `self.model` and `rows`.
        package: the package that the expressions need.
        datatype: of the response, if the settings do not name another.
    """

    files: tuple[str, ...]
    load: str
    predict: str
    package: str
    datatype: str


RUNTIMES = {
    "mlserver_sklearn.SKLearnModel": Runtime(
        ("model.joblib", "model.pickle", "model.pkl"), "joblib.load(path)", "self.model.predict(rows)", "joblib", "FP64"
    ),
    "mlserver_xgboost.XGBoostModel": Runtime(
        ("model.bst", "model.json", "model.ubj"),
        "xgboost.Booster(model_file=path)",
        "self.model.predict(xgboost.DMatrix(rows))",
        "xgboost",
        "FP32",
    ),
    "mlserver_lightgbm.LightGBMModel": Runtime(
        ("model.bst", "model.txt"),
        "lightgbm.Booster(model_file=path)",
        "self.model.predict(rows)",
        "lightgbm",
        "FP64",
    ),
}
"""By `implementation` in model-settings.json."""
MLSERVER = '''"""Made by `inferd models init {file}`: the model {name!r}, which MLServer's {implementation} served."""

from pathlib import Path

import {package}
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        path = str(Path(args["model_repository"]) / args["model_version"] / {model!r})
        self.model = {load}

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, {input!r}).as_numpy() for request in requests]
        rows = np.concatenate(inputs)  # one prediction for the batch
        found = np.asarray({predict}).astype(pb_utils.triton_string_to_numpy({datatype!r}))
        found = found.reshape(len(rows), -1)
        responses = []
        for each in inputs:
            mine, found = found[: len(each)], found[len(each) :]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor({output!r}, mine)]))
        return responses
'''


def _of_mlserver(file: Path) -> Imported:
    try:
        settings = json.loads(file.read_text())
        name, implementation = str(settings["name"]), str(settings["implementation"])
        parameters = settings.get("parameters") or {}
        uri = parameters.get("uri") or ""
        inputs, outputs = (list(settings.get(key) or ()) for key in ("inputs", "outputs"))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{file}: expected settings of MLServer with name and implementation: {error}") from None
    runtime = RUNTIMES.get(implementation)
    if runtime is None:
        raise InvalidArgument(f"{file}: implementation {implementation!r}: expected one of {', '.join(RUNTIMES)}")
    if len(inputs) > 1 or len(outputs) > 1:
        raise InvalidArgument(f"{file}: expected one input and one output at most, as these runtimes have")
    most = settings.get("max_batch_size") or 64
    if not isinstance(most, int) or not 0 < most < 1 << 31:
        raise InvalidArgument(f"{file}: max_batch_size: expected a number above 0, got {most!r}")
    model = _model_of(file, uri, runtime)
    read = _tensor(file, inputs, "FP32", [-1, -1])
    made = _tensor(file, outputs, runtime.datatype, [-1, 1])
    config = pb.ModelConfig(max_batch_size=most)
    config.input.add(name=read["name"], data_type=_type_of(file, read), dims=_dims(read))
    config.output.add(name=made["name"], data_type=_type_of(file, made), dims=_dims(made))
    text = MLSERVER.format(
        file=file.name,
        name=name,
        implementation=implementation,
        package=runtime.package,
        model=model.name,
        load=runtime.load,
        predict=runtime.predict,
        input=read["name"],
        output=made["name"],
        datatype=f"TYPE_{made['datatype']}",
    )

    def put(folder: Path) -> None:
        with suppress(shutil.SameFileError):
            shutil.copyfile(model, folder / model.name)
        (folder / "model.py").write_text(text)

    hint = "MLServer's settings need not name tensors: check them." if not (inputs and outputs) else ""
    return Imported(name, config, hint, put)


def _model_of(file: Path, uri: str, runtime: Runtime) -> Path:
    """The file of the model beside the settings."""
    if "://" in uri and not uri.startswith("file://"):
        raise InvalidArgument(f"{file}: uri {uri!r}: download the model, and name its file")
    there = file.parent / uri.removeprefix("file://")
    candidates = [there] if there.is_file() else [there / each for each in runtime.files]
    for each in candidates:
        if each.is_file():
            return each
    raise InvalidArgument(f"{file}: there is no {there if uri else ' or '.join(runtime.files)}")


def _tensor(file: Path, given: Sequence[Any], datatype: str, shape: list[int]) -> dict[str, Any]:
    """The name, the datatype and the shape of the input or output that the settings name, or else these."""
    found: dict[str, Any] = {"name": "predict", "datatype": datatype, "shape": shape}
    if all(isinstance(each, dict) for each in given):
        for each in given:
            found |= each
        sizes = found["shape"]
        if (
            isinstance(found["name"], str)
            and isinstance(found["datatype"], str)
            and isinstance(sizes, list)
            and all(isinstance(size, int) and -1 <= size < 1 << 63 for size in sizes)
        ):
            return found
    raise InvalidArgument(f"{file}: expected a tensor's name, datatype and shape, a list of numbers, got {given}")


def _type_of(file: Path, tensor: Mapping[str, Any]) -> Any:
    datatype = tensor["datatype"]
    if datatype not in TYPE_OF or datatype == "BYTES":
        raise InvalidArgument(f"{file}: tensor {tensor['name']!r} is of {datatype!r}, expected numbers")
    return TYPE_OF[datatype]


def _dims(tensor: Mapping[str, Any]) -> list[int]:
    """The tensor's dimensions without that of the batch."""
    return [int(size) for size in tensor["shape"][1:]] or [1]
