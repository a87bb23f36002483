"""The command `inferd models init`: makes a model of a repository from a model file.

The configuration is the one that auto-completion derives from the file: the model is served as it would be without one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from google.protobuf import text_format

from inferd.backends.api import BackendError, ModelSource, ModelSpec, Signature, TensorSpec
from inferd.server.composition.engine import make_loader, model_options
from inferd.server.engine import config as configuration
from inferd.server.engine.config.tensors import TYPE_OF
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.repository.folders import ModelFolder, check_name, version_folder
from inferd.server.errors import AlreadyExists, InvalidArgument, Misused, ServerError
from inferd.server.importing import imported
from inferd.server.settings import Settings
from inferd_client.pb import model_config_pb2 as pb

CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class Kind:
    """Model files of one framework.

    Attributes:
        backend: the backend that serves them.
        file: their name in a version's folder.
        suffixes: how the names of such files end; if the model is a folder, the names of files in it.
        hint: what the user should check in the written configuration.
        guesses: whether the backend guesses the tensors, which the file does not record.
    """

    backend: str
    file: str
    suffixes: tuple[str, ...]
    hint: str = ""
    guesses: bool = False


PYTHON = Kind("python", "model.py", (".py",), "A model.py declares its tensors in auto_complete_config, or here.")
KINDS = (
    Kind("onnxruntime", "model.onnx", (".onnx",)),
    Kind(
        "pytorch",
        "model.pt",
        (".pt", ".pth", ".jit", ".torchscript"),
        "TorchScript does not record shapes and datatypes. The model ran with these, on zeros: check them.",
        guesses=True,
    ),
    Kind("pytorch", "model.pt2", (".pt2",)),
    Kind("openvino", "model.xml", (".xml",)),
    Kind("tensorflow", "model.savedmodel", ("saved_model.pb",)),
    Kind("tensorflow", "model.graphdef", (".graphdef",), "A GraphDef does not record its tensors: name its operators."),
    Kind("tensorrt", "model.plan", (".plan", ".engine")),
    PYTHON,
)
"""The kinds of model files. A file is of the first kind that has its suffix."""


def make_model(
    file: Path,
    repository: Path,
    name: str,
    max_batch_size: int | None,
    inputs: Sequence[str] = (),
    *,
    force: bool,
    backend_config: tuple[str, ...] = (),
) -> int:
    """Write a model's folder, and print its configuration. Returns the exit status of the command.

    Args:
        inputs: known inputs of a TorchScript file, "NAME:DATATYPE:SIZE,SIZE" each; without the batch, unless the
            largest batch is 0.
        backend_config: options of backends, as the server takes them.

    Raises:
        Misused: an input has another form, or the file records its inputs itself; or the largest batch is impossible.
        InvalidArgument: the file is no model file.
        AlreadyExists: the repository has such a model.
        ConfigError: the file cannot be read by its framework.
    """
    if max_batch_size is not None and not 0 <= max_batch_size < 1 << 31:
        raise Misused(f"--max-batch-size: expected 0 to {(1 << 31) - 1}, got {max_batch_size}")
    foreign = imported(file)
    kind = replace(PYTHON, hint=foreign.hint) if foreign else kind_of(file)
    name = name or (foreign.name if foreign else _usual_name(file))
    check_name(name)
    known = [known_input(text) for text in inputs]
    if known and not kind.guesses:
        raise Misused(f"--input is for TorchScript files: {file.name} records its inputs itself")
    target = repository / name
    if target.exists() and not force:
        raise AlreadyExists(f"{target} exists: give another --name, or --force to write over it")
    minimal = pb.ModelConfig(name=name, backend=kind.backend)
    if foreign:
        minimal.MergeFrom(foreign.config)
    put = foreign.put if foreign else lambda version: _put(file, version / kind.file)
    config, problem = _completed(minimal, put, kind, max_batch_size, known, backend_config)
    version = target / "1"
    version.mkdir(parents=True, exist_ok=True)
    put(version)
    text = commented(config, kind, file, problem)
    (target / CONFIG).write_text(text)
    print(f"{target / CONFIG}:\n\n{text}")
    options = "".join(f" --backend-config {shlex.quote(each)}" for each in backend_config)
    print(f"serve it:    inferd serve --model-repository {repository}{options}")
    print(f"look at it:  inferd check {repository}{options}")
    if problem:
        print(f"inferd: the model cannot be served yet: {problem}", file=sys.stderr)
        return 1
    return 0


def kind_of(file: Path) -> Kind:
    """The kind of a model file or folder.

    Raises:
        InvalidArgument: the file is no model file, or does not exist.
    """
    if not file.exists():
        raise InvalidArgument(f"there is no file {file}")
    for kind in KINDS:
        if file.suffix.lower() in kind.suffixes or (
            file.is_dir() and any((file / each).exists() for each in kind.suffixes)
        ):
            return kind
    known = ", ".join([*(suffix for kind in KINDS for suffix in kind.suffixes), ".mar", "model-settings.json"])
    raise InvalidArgument(f"{file}: expected a model file whose name ends in one of {known}")


def known_input(text: str) -> TensorSpec:
    """The input that "NAME:DATATYPE:SIZE,SIZE" describes, without the batch.

    Raises:
        Misused: the text has another form.
    """
    rest, _, sizes = text.rpartition(":")
    name, _, datatype = rest.rpartition(":")
    datatype = datatype.upper().removeprefix("TYPE_").replace("STRING", "BYTES")
    try:
        dims = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        dims = (0,)
    if not name or datatype not in TYPE_OF or any(size == 0 or size < -1 for size in dims):
        raise Misused(f"--input: expected NAME:DATATYPE:SIZE,SIZE, such as x:FP32:3,-1,-1, got {text!r}")
    return TensorSpec(name, datatype, dims)


def _put(file: Path, target: Path) -> None:
    """Copy a folder, or a file with its files of weights (of ONNX and OpenVINO), unless they are there already."""
    if target.exists() and target.samefile(file):
        return
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


def _usual_name(file: Path) -> str:
    """The file's name without its suffix; for a usual name such as model.onnx, the name of the model's folder."""
    if file.stem != "model":
        return file.stem
    folder = file.absolute().parent
    return (version_folder(folder) or file.absolute()).parent.name


def _completed(
    minimal: pb.ModelConfig,
    put: Callable[[Path], None],
    kind: Kind,
    max_batch_size: int | None,
    known: Sequence[TensorSpec],
    backend_config: tuple[str, ...],
) -> tuple[pb.ModelConfig, str]:
    """The completed configuration, and the problem that keeps the model from being served; empty without one.

    Args:
        minimal: is completed.
        put: writes the model's files into the folder of a version.
    """
    found, name = minimal, minimal.name
    if max_batch_size is not None:
        minimal.max_batch_size = max_batch_size
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / name
        (model / "1").mkdir(parents=True)
        put(model / "1")
        settings = Settings(model_repository=(folder,), backend_config=backend_config)
        loader, options = make_loader(settings), model_options(settings, Gpus())
        try:
            if kind.guesses:
                source = ModelSource(ModelSpec(name, kind.backend), 1, model / "1")
                whole = max_batch_size == 0 and bool(known)
                signature = loader.backend(kind.backend).guess(source, known, whole=whole)
                configuration.complete(minimal, signature if max_batch_size != 0 else _unbatched(signature))
                _reshape_scalars(minimal)
            text = text_format.MessageToString(minimal)
            if max_batch_size == 0:
                text += "max_batch_size: 0\n"  # an absent field would mean something else
            (model / CONFIG).write_text(text)
            made = ModelFolder(name, model, Path(folder), (1,))
            prepared = configuration.prepare(made, options, loader)
            found = prepared.config
            backend = loader.backend_of_model(prepared.spec.backend, (model / "1", model))
            told = partial(configuration.config_to_json, prepared.config)
            backend.check(ModelSource(prepared.spec, 1, model / "1", told))
        except (ServerError, BackendError) as error:
            return found, str(error).replace(f"{folder}/", "")
    return found, ""


def _unbatched(signature: Signature) -> Signature:
    """The signature with the batch among the dimensions."""
    if not signature.batches:
        return signature
    inputs, outputs = (
        tuple(replace(spec, dims=(-1, *spec.dims)) for spec in specs) for specs in (signature.inputs, signature.outputs)
    )
    return Signature(inputs, outputs, batches=False)


def _reshape_scalars(config: pb.ModelConfig) -> None:
    """Give scalars one dimension, as every configuration must: clients see it, the model does not."""
    tensors: list[pb.ModelInput | pb.ModelOutput] = [*config.input, *config.output]
    for tensor in tensors:
        if not tensor.dims:
            tensor.dims.append(1)
            tensor.reshape.SetInParent()


def commented(config: pb.ModelConfig, kind: Kind, file: Path, problem: str) -> str:
    """The text of a config.pbtxt, with comments about fields that the user may want to change."""
    return "\n".join(_lines(config, kind, file, problem)) + "\n"


def _lines(config: pb.ModelConfig, kind: Kind, file: Path, problem: str) -> Iterator[str]:
    yield f"# Made by `inferd models init {file.name}`. Every field: docs/configuration.md."
    if kind.hint and not (kind.guesses and problem):
        yield f"# {kind.hint}"
    for line in problem.splitlines():
        yield f"# The model cannot be served yet: {line}"
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
        yield "# Requests that come close to each other are executed together. `inferd tune` finds the best values."
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
            sizes = f" shape: [ {', '.join(map(str, tensor.reshape.shape))} ]" if tensor.reshape.shape else ""
            shape = f" reshape {{{sizes} }}"
        for flag in ("optional", "is_shape_tensor"):
            if getattr(tensor, flag, False):
                shape += f" {flag}: true"
        yield f'{what} {{ name: "{tensor.name}" data_type: {datatype} dims: [ {dims} ]{shape} }}'
