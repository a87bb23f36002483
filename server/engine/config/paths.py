"""Checks the paths in every configuration before the server opens a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.pbtxt.files import inside
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.errors import ConfigError
from inferd.server.pb import model_config_pb2 as pb


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
