"""What is checked of a model's files before it is loaded.

The paths in every configuration are checked before the server opens a file. Repository agents then process the folder:
Triton's are shared libraries; this server implements only `checksum`. Pointer files are refused: in a clone without
Git LFS, a small text stands in place of each model file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from inferd._native.file_contents import find_beginning
from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.pbtxt.files import inside
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb


def check_paths(config: pb.ModelConfig, model_dir: Path, version_dir: Path, source: Source) -> None:
    """Refuse names of model files that lead out of the model's folder, before anything looks at the files.

    Raises:
        ConfigError: a name does; or a client sent the configuration, and an accelerator's parameter is a path.
    """
    named: list[tuple[FieldPath, str]] = [
        (("cc_model_filenames",), name) for name in config.cc_model_filenames.values()
    ]
    if config.default_model_filename:
        named.append((("default_model_filename",), config.default_model_filename))
    for path, name in named:
        try:
            inside(version_dir, name, model_dir)
        except ConfigError as error:
            raise ConfigError(f"{source.at(*path)}: {path[0]} {error}") from None
    if source.from_client:
        raise_any(_accelerator_paths(config), config.name or model_dir.name, source)


def _accelerator_paths(config: pb.ModelConfig) -> Iterator[Finding]:
    accelerators = config.optimization.execution_accelerators
    for each in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        for key in each.parameters:
            if "path" in key:  # of caches that are written, of libraries that are loaded
                text = f"parameter '{key}' of accelerator '{each.name}' is a path of the server"
                yield Finding(("optimization",), text, "a configuration that a client brings may not have one")


CHECKSUM = "checksum"
ALGORITHMS = {"MD5": "md5", "SHA256": "sha256", "SHA512": "sha512"}
"""Algorithms by the beginning of a parameter's name. Triton has the first only."""


def run_agents(config: pb.ModelConfig, model_dir: Path, source: Source) -> None:
    """Have the model's agents process its folder. Blocks: an agent may read all files.

    Raises:
        ConfigError: there is no such agent, or a file does not match its checksum.
    """
    raise_any(_findings(config, model_dir), config.name, source)


def _findings(config: pb.ModelConfig, model_dir: Path) -> Iterator[Finding]:
    for index, agent in enumerate(config.model_repository_agents.agents):
        path: FieldPath = ("model_repository_agents", "agents", index)
        if agent.name != CHECKSUM:
            text = f"there is no repository agent '{agent.name}'"
            yield Finding(path, text, f"'{CHECKSUM}' is the only one that is served; remove the others")
            continue
        for key, expected in sorted(agent.parameters.items()):
            if problem := _checked(key, expected.strip().lower(), model_dir):
                yield Finding((*path, "parameters", key), f"repository agent '{CHECKSUM}': {problem}")


def _checked(key: str, expected: str, model_dir: Path) -> str:
    """The problem of the file that a parameter `MD5:1/model.onnx` names; empty without one."""
    name, colon, file = key.partition(":")
    algorithm = ALGORITHMS.get(name.upper())
    if algorithm is None or not colon or not file:
        return f"expected a parameter such as MD5:1/model.onnx, with one of {', '.join(ALGORITHMS)}, got '{key}'"
    try:
        path = inside(model_dir, file, model_dir)
        if not path.is_file():
            return f"there is no file '{file}'"
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, algorithm).hexdigest()
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{file}: {(error.strerror or str(error)).lower()}"
    return "" if found == expected else f"mismatched {name} hash for file '{file}': expected {expected}, got {found}"


BEGINNING = b"version https://git-lfs.github.com/spec/"
LARGEST = 1024  # bytes of such a text, by its specification


def refuse_pointers(version: Path) -> None:
    """Check that the version's folder holds no pointer file.

    Raises:
        ConfigError: the folder holds one, or cannot be read.
    """
    try:
        found = find_beginning(str(version), BEGINNING, LARGEST)
    except OSError as error:
        raise ConfigError(f"{error.filename or version}: {(error.strerror or str(error)).lower()}") from None
    if found is not None:
        raise ConfigError(f"{version / found}: it is a pointer of Git LFS, not the file itself: run git lfs pull")
