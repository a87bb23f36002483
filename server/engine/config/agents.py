"""Repository agents, which process a model's folder before it is loaded. Triton's are shared libraries; this server
implements only `checksum`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from inferd.server.engine.config.findings import Finding, raise_any
from inferd.server.engine.pbtxt.files import inside
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.errors import ConfigError
from inferd.server.pb import model_config_pb2 as pb

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
