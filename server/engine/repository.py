"""Model repositories: which models and versions lie there. Nothing is loaded here."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from server.errors import ConfigError, InvalidArgument
from server.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.repository")

AMBIGUOUS = "model appears in two or more repositories"

MAX_NAME_BYTES = 255
# A name becomes part of paths, of log lines and of worker commands.
NAME = re.compile(r"\w[\w.+@=:~-]*")
NOT_VERSIONS = {"warmup", "initial_state", "configs"}
MAX_VERSION = (1 << 63) - 1

CONFIGURATION = "configuration"
REST = "rest"

Marks = Mapping[str, frozenset[tuple[str, int, int]]]
"""What tells whether files have changed: (path in the model's folder, time of modification in ns, size) of every file,
by the part of the model it belongs to: a version's number, CONFIGURATION, or the REST."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder of a repository that holds a model."""

    name: str
    path: Path
    repository: Path
    versions: tuple[int, ...] = ()  # ascending
    problem: str = ""  # why it cannot be served, whatever its configuration says

    def version_path(self, version: int) -> Path:
        return self.path / str(version)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a model.

    Raises:
        InvalidArgument: it is empty, too long, or has characters that mean something to a path, a shell or a log.
    """
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty")
    if ".." in name or "/" in name or "\\" in name:
        raise InvalidArgument(f"invalid model name {name[:MAX_NAME_BYTES]!r}: it contains path traversal characters")
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"invalid model name {name[:MAX_NAME_BYTES]!r}: expected letters, digits and . _ + @ = : ~ -, "
            "beginning with a letter, a digit or _"
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"invalid model name: it has more than {MAX_NAME_BYTES} bytes")


def scan(paths: Iterable[Path]) -> list[ModelFolder]:
    """The models of all repositories, by name. A name found in two of them is listed once, with that problem.

    Raises:
        ConfigError: a path is no folder that can be read.
    """
    found: dict[str, ModelFolder] = {}
    for repository in dict.fromkeys(path.resolve() for path in paths):
        for folder in _scan_one(repository):
            known = found.get(folder.name)
            found[folder.name] = replace(known, problem=AMBIGUOUS) if known else folder
    return [found[name] for name in sorted(found)]


def find(paths: Iterable[Path], name: str) -> ModelFolder | None:
    """The model of this name, with its problem when it lies in two repositories; None when it lies in none.

    What cannot be a model's name is none's, wherever its path may lead.
    """
    if not NAME.fullmatch(name) or ".." in name:
        return None
    folders = [path.resolve() / name for path in dict.fromkeys(paths)]
    found = [_model_folder(folder, folder.parent) for folder in dict.fromkeys(folders) if folder.is_dir()]
    return replace(found[0], problem=AMBIGUOUS) if len(found) > 1 else found[0] if found else None


def marks(folder: ModelFolder) -> Marks:
    """The marks of a model's files as they are now. What Python compiles and hidden files are left out."""
    found: dict[str, set[tuple[str, int, int]]] = {CONFIGURATION: set(), REST: set()}
    for path, size, modified in _files(folder.path):
        first = path.parts[0]
        if first == "configs" or path.name == str(path) == "config.pbtxt":
            part = CONFIGURATION
        else:
            part = first if first.isdecimal() and len(path.parts) > 1 else REST
        found.setdefault(part, set()).add((str(path), modified, size))
    for version in folder.versions:
        found.setdefault(str(version), set())
    return {part: frozenset(files) for part, files in found.items()}


def _files(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Path in the folder, size and time of modification of each file; links are followed, once into each folder."""
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        try:
            about = Path(place).stat()
        except OSError:
            continue  # it has gone meanwhile
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            try:
                about = path.stat()
            except OSError:
                continue
            if not name.startswith("."):
                yield path.relative_to(folder), about.st_size, about.st_mtime_ns


def _scan_one(repository: Path) -> list[ModelFolder]:
    try:
        entries = [path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        text = (error.strerror or str(error)).lower()
        raise ConfigError(f"model repository '{repository}' cannot be read: {text}") from None
    return [_model_folder(path, repository) for path in entries]


def _model_folder(path: Path, repository: Path) -> ModelFolder:
    name = path.name.encode(errors="surrogateescape").decode(errors="replace")
    try:
        check_name(name)
        return ModelFolder(name, path, repository, versions_of(path))
    except InvalidArgument as error:
        return ModelFolder(name, path, repository, problem=str(error))
    except OSError as error:
        return ModelFolder(name, path, repository, problem=f"{path}: {(error.strerror or str(error)).lower()}")


def versions_of(path: Path) -> tuple[int, ...]:
    """The versions of a model folder, ascending; folders that look like one and are none are logged."""
    found = []
    for entry in path.iterdir():
        name = entry.name
        if name in NOT_VERSIONS or name.startswith(".") or not entry.is_dir():
            continue
        if not (name.isascii() and name.isdigit()) or int(name) > MAX_VERSION:
            log.warning("%s: ignored: the name of a version is a number", entry)
        elif len(name) > 1 and name.startswith("0"):
            log.warning("%s: ignored: the name of a version has no leading zeros", entry)
        else:
            found.append(int(name))
    return tuple(sorted(found))


def select_versions(config: pb.ModelConfig, folder: ModelFolder) -> list[int]:
    """The versions to serve under the configuration's version policy, ascending.

    Raises:
        ConfigError: there is none.
    """
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            chosen = list(folder.versions)
        case "specific":
            wanted = set(policy.specific.versions)
            chosen = [version for version in folder.versions if version in wanted]
            for version in sorted(wanted - set(chosen)):
                log.warning("%s: version %d is configured but has no folder", folder.path, version)
        case _:
            chosen = list(folder.versions[-max(1, policy.latest.num_versions) :])
    if not chosen:
        there = ", ".join(map(str, folder.versions)) or "none"
        raise ConfigError(
            f"{folder.path}: at least one version must be available under the version policy of model "
            f"'{folder.name}': versions with a folder: {there}"
        )
    return chosen
