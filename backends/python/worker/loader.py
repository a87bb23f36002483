"""A model's calls to load and unload models, and to check their readiness."""

from __future__ import annotations

from collections.abc import Mapping

from . import runtime
from .errors import TritonModelException
from .texts import text_of


def get_model_dir() -> str:
    """The version directory of the model."""
    return runtime.current().model_dir


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model.

    Args:
        model_name: a model of the repository.
        config: a configuration as JSON text, instead of its own.
        files: contents by path, such as "file:1/model.onnx", instead of the repository's files.

    Raises:
        TritonModelException: the model does not load, or the server runs without `--model-control-mode explicit`.
    """
    contents: dict[str, bytes] = {}
    if files is not None:
        if not isinstance(files, Mapping):
            raise TritonModelException(
                f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
            )
        contents = {str(path): bytes(memoryview(content)) for path, content in files.items()}
    _ask("load model", "load_model", {"name": model_name, "config": config, "files": contents})


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model.

    Args:
        model_name: the model.
        unload_dependents: an ensemble's composing models as well.

    Raises:
        TritonModelException: the server runs without `--model-control-mode explicit`.
    """
    _ask("unload model", "unload_model", {"name": model_name, "unload_dependents": bool(unload_dependents)})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model can be called.

    Args:
        model_name: the model.
        model_version: its version; empty for the latest.

    Raises:
        TritonModelException: the version is no number.
    """
    arguments = {"name": model_name, "version": str(model_version)}
    return bool(_ask("check model readiness", "is_model_ready", arguments))


def _ask(doing: str, question: str, arguments: Mapping[str, object]) -> object:
    arguments = {**arguments, "name": text_of(arguments["name"], "a model's name")}
    try:
        answer: object = runtime.current().channel.ask(question, arguments)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to {doing}: {error}") from None
    return answer
