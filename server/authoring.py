"""The command `inferd models init`: a model file → a model of a repository.

The configuration is what auto-completion makes of the file, so what is written is what would be served without it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from backends.api import BackendError
from server.app import make_loader
from server.engine import config as configuration
from server.engine.repository import ModelFolder, check_name
from server.errors import AlreadyExists, InvalidArgument, ServerError
from server.pb import model_config_pb2 as pb
from server.settings import Settings

CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class Kind:
    """Model files of one framework.

    Attributes:
        backend: that serves them.
        file: their name in a version's folder.
        suffixes: of their names elsewhere; of folders, what lies in them.
        hint: what is to be looked at in the configuration that is written.
    """

    backend: str
    file: str
    suffixes: tuple[str, ...]
    hint: str = ""


KINDS = (
    Kind("onnxruntime", "model.onnx", (".onnx",)),
    Kind(
        "pytorch",
        "model.pt",
        (".pt", ".pth", ".jit", ".torchscript"),
        "TorchScript does not say shapes and datatypes: set those of each tensor to the model's.",
    ),
    Kind("pytorch", "model.pt2", (".pt2",)),
    Kind("openvino", "model.xml", (".xml",)),
    Kind("tensorflow", "model.savedmodel", ("saved_model.pb",)),
    Kind("tensorflow", "model.graphdef", (".graphdef",), "A GraphDef does not say its tensors: name its operators."),
    Kind("tensorrt", "model.plan", (".plan", ".engine")),
    Kind("python", "model.py", (".py",), "A model.py says its tensors in auto_complete_config, or here."),
)
"""What can be made a model of, the one that is meant by a suffix first."""


def make_model(file: Path, repository: Path, name: str, max_batch_size: int | None, *, force: bool) -> int:
    """Write a model's folder, and print what is in it; the exit status of the command.

    Raises:
        InvalidArgument: the file is none of a model.
        AlreadyExists: the repository has such a model.
        ConfigError: the file cannot be read by its framework.
    """
    kind = kind_of(file)
    name = name or (file.stem if file.stem != "model" else file.absolute().parent.name)
    check_name(name)
    target = repository / name
    if target.exists() and not force:
        raise AlreadyExists(f"{target} is there: give another --name, or --force to write over it")
    config, problem = _completed(file, kind, name, max_batch_size)
    version = target / "1"
    version.mkdir(parents=True, exist_ok=True)
    _put(file, version / kind.file)
    text = commented(config, kind, file, problem)
    (target / CONFIG).write_text(text)
    print(f"{target / CONFIG}:\n\n{text}")
    print(f"serve it:    inferd serve --model-repository {repository}")
    print(f"look at it:  inferd check {repository}")
    if problem:
        print(f"inferd: the file did not say everything: {problem}", file=sys.stderr)
        return 1
    return 0


def kind_of(file: Path) -> Kind:
    """Of a model file or folder.

    Raises:
        InvalidArgument: it is none.
    """
    if not file.exists():
        raise InvalidArgument(f"there is no file {file}")
    for kind in KINDS:
        if file.suffix.lower() in kind.suffixes or (
            file.is_dir() and any((file / each).exists() for each in kind.suffixes)
        ):
            return kind
    known = ", ".join(suffix for kind in KINDS for suffix in kind.suffixes)
    raise InvalidArgument(f"{file}: expected a model file whose name ends in one of {known}")


def _put(file: Path, target: Path) -> None:
    """Copy a file, with those that hold its weights (of ONNX and OpenVINO), or a folder."""
    if file.is_dir():
        shutil.copytree(file, target, dirs_exist_ok=True)
        return
    shutil.copyfile(file, target)
    weights = file.with_suffix(".bin")
    if target.suffix == ".xml" and weights.is_file():
        shutil.copyfile(weights, target.with_suffix(".bin"))
    for suffix in (".data", "_data"):
        beside = file.with_name(file.name + suffix)
        if beside.is_file():
            shutil.copyfile(beside, target.with_name(beside.name))


def _completed(file: Path, kind: Kind, name: str, max_batch_size: int | None) -> tuple[pb.ModelConfig, str]:
    """The configuration, and what keeps it from being complete."""
    minimal = pb.ModelConfig(name=name, backend=kind.backend)
    if max_batch_size is not None:
        minimal.max_batch_size = max_batch_size
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / name
        (model / "1").mkdir(parents=True)
        _put(file, model / "1" / kind.file)
        text = text_format.MessageToString(minimal)
        if max_batch_size == 0:
            text += "max_batch_size: 0\n"
        (model / CONFIG).write_text(text)
        try:
            loader = make_loader(Settings(model_repository=(folder,)))
            made = ModelFolder(name, model, Path(folder), (1,))
            prepared = configuration.prepare(made, configuration.Options(), loader)
        except (ServerError, BackendError) as error:
            return minimal, str(error).replace(f"{folder}/", "")
    return prepared.config, ""


def commented(config: pb.ModelConfig, kind: Kind, file: Path, problem: str) -> str:
    """The text of a config.pbtxt, with what one may want to change in it."""
    return "\n".join(_lines(config, kind, file, problem)) + "\n"


def _lines(config: pb.ModelConfig, kind: Kind, file: Path, problem: str) -> Iterator[str]:
    yield f"# Made by `inferd models init {file.name}`. Every field: docs/configuration.md."
    if kind.hint:
        yield f"# {kind.hint}"
    for line in problem.splitlines():
        yield f"# Not complete: {line}"
    yield f'name: "{config.name}"'
    yield f'backend: "{config.backend or kind.backend}"'
    yield ""
    if config.max_batch_size:
        yield "# The most rows that are executed at once; the dims below are without the batch's. 0: no batching."
    else:
        yield "# The model has no batch dimension that is free, so requests are executed one by one."
    yield f"max_batch_size: {config.max_batch_size}"
    for what, tensors in (("input", config.input), ("output", config.output)):
        yield from _tensors(what, tensors)
    if not config.input:
        yield '# input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }'
        yield '# output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] }'
    yield ""
    if config.max_batch_size:
        yield "# Requests that come close to each other are executed together. `inferd tune` finds out what pays."
        yield "dynamic_batching {"
        yield "  # max_queue_delay_microseconds: 100"
        yield "}"
        yield ""
    yield "# Copies of the model that execute at the same time."
    yield "instance_group { count: 1 }"


def _tensors(what: str, tensors: Sequence[pb.ModelInput | pb.ModelOutput]) -> Iterator[str]:
    for tensor in tensors:
        dims = ", ".join(map(str, tensor.dims))
        datatype = pb.DataType.Name(tensor.data_type)
        shape = ""
        if tensor.HasField("reshape"):
            shape = f" reshape {{ shape: [ {', '.join(map(str, tensor.reshape.shape))} ] }}"
        yield f'{what} {{ name: "{tensor.name}" data_type: {datatype} dims: [ {dims} ]{shape} }}'
