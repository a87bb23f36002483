"""Model repositories in folders: their models and versions. Nothing is loaded here."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from inferd._native.model_files import NO_FILES, Mark, Watch, folders_in, look_at_parts
from inferd.server.errors import LACKS, ConfigError, Exhausted, InvalidArgument, ServerError, system_says
from inferd_client.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.repository")

AMBIGUOUS = "model appears in two or more repositories"

MAX_NAME_BYTES = 255
MAX_FILES = 100_000  # files of a model that are watched for changes
NOTHING_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))
NOT_MODELS = frozenset({"lost+found", "__pycache__", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information"})
"""Folders that file systems and tools make. Hidden folders, which begin with a dot, are no models either."""
CONFIG_FILE = "config.pbtxt"
NAMED_CONFIGS = "configs"  # the folder of further configurations, for --model-config-name
NOT_VERSIONS = {"warmup", "initial_state", NAMED_CONFIGS}
MAX_VERSION = (1 << 63) - 1

CONFIGURATION = "configuration"
REST = "rest"

Marks = Mapping[str, Mark]
"""The state of a model's files, to notice changes, by part. A part is a version's number, CONFIGURATION (those of the
versions, too), or the REST."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder of a repository that holds a model."""

    name: str
    path: Path
    repository: Path
    versions: tuple[int, ...] = ()  # ascending
    problem: str = ""  # why no configuration could make it servable
    renamed: bool = False  # the operator has named the model; its configuration's name does not count
    is_bare: bool = False  # the given folder has no version's folder: its configuration is the model's
    misnamed: tuple[str, ...] | None = None  # folders in it whose names are no version's; None: not known
    is_empty: bool = False  # the folder is empty
    seen: Marks | None = None  # the marks of its files, if they do not come from the files
    origin: str = ""  # the original of a copy; copies of one original have equal files where their marks are equal
    stands_for: tuple[tuple[str, str], ...] = ()  # paths of a temporary folder, each with the path that was given

    @property
    def source(self) -> str:
        """The origin, which differs from that of a model of the same name elsewhere."""
        return self.origin or str(self.path)

    def version_path(self, version: int) -> Path:
        return self.path / str(version)

    def shown(self, text: str) -> str:
        """In a text about the model, replace paths of temporary folders by the given paths."""
        for made, given in self.stands_for:
            text = text.replace(made, given)
        return text


def check_name(name: str) -> None:
    """Check that a text can be the name of a model.

    Raises:
        InvalidArgument: the name is empty, too long, hidden, a path to elsewhere, or not printable.
    """
    shown = repr(name[:MAX_NAME_BYTES])
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty")
    if name in {".", ".."} or "/" in name or "\\" in name:
        raise InvalidArgument(f"invalid model name {shown}: it contains path traversal characters")
    if name.startswith("."):
        raise InvalidArgument(f"invalid model name {shown}: a name that begins with a dot is a hidden folder's")
    if not name.isprintable() or "\ufffd" in name:
        raise InvalidArgument(f"invalid model name {shown}: it must be printable UTF-8")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"invalid model name: it has more than {MAX_NAME_BYTES} bytes")


def scan(paths: Iterable[Path], but: Set[str] = frozenset()) -> list[ModelFolder]:
    """The models of all repositories, by name. A name found in two of them is listed once, with the problem AMBIGUOUS.

    An empty folder is no model; the log says so.

    Args:
        paths: of the repositories.
        but: names of models to leave out.

    Raises:
        ConfigError: a path is no readable folder.
    """
    found: dict[str, ModelFolder] = {}
    for repository in dict.fromkeys(map(os.path.realpath, paths)):  # which raises no error
        for folder in _scan_one(Path(repository), but):
            known = found.get(folder.name)
            found[folder.name] = replace(known, problem=AMBIGUOUS) if known else folder
    return [found[name] for name in sorted(found)]


def find(paths: Iterable[Path], name: str) -> ModelFolder | None:
    """The model of this name, with the problem AMBIGUOUS if two repositories have it; None if none has.

    A text that cannot be a model's name names none, even if its path exists.
    """
    try:
        check_name(name)
    except InvalidArgument:
        return None
    repositories = dict.fromkeys(os.path.realpath(path) for path in paths)
    folders = (_model_folder(Path(f"{each}/{name}"), _repository(each)) for each in repositories)
    found = [folder for folder in folders if folder is not None]
    return replace(found[0], problem=AMBIGUOUS) if len(found) > 1 else found[0] if found else None


@lru_cache(16)
def _repository(path: str) -> Path:
    """One for all its models, of which there may be thousands."""
    return Path(path)


def marks(folder: ModelFolder) -> Marks:
    """The present marks of a model's files, without compiled Python files and hidden files.

    Raises:
        Exhausted: the server has no descriptor or no memory to look at them.
    """
    if folder.seen is not None:
        return folder.seen
    try:
        found, is_crowded = look_at_parts(str(folder.path), MAX_FILES)
    except OSError as error:
        raise Exhausted(f"{folder.path}: {system_says(error).lower()}") from error
    if is_crowded:
        log.warning("%s: more than %d files: changes of the others are not noticed", folder.source, MAX_FILES)
    for version in folder.versions:
        found.setdefault(str(version), NO_FILES)
    return found


def size_of(marks: Marks, versions: Iterable[int]) -> int:
    """Bytes of the files of these versions."""
    return sum(marks.get(str(version), NO_FILES).size for version in versions)


def look(path: Path, watch: Watch) -> dict[str, object]:
    """The present state of each model of a repository; it differs whenever its marks or versions differ.

    Raises:
        ConfigError: the repository is no readable folder.
        Exhausted: the server has no descriptor or no memory to look at it.
        InterruptedError: `watch` was ended.
    """
    repository = Path(os.path.realpath(path))  # which raises no error
    try:
        digests = watch.look(str(repository), NOT_MODELS, MAX_FILES)
    except InterruptedError:
        raise
    except OSError as error:
        raise _unreadable(repository, error) from error
    found: dict[str, object] = {}
    for name, digest in digests.items():
        shown = _shown(name)
        found[shown] = (str(repository), digest, found.get(shown))
    return found


def states(found: Iterable[ModelFolder]) -> dict[str, object]:
    """The states of these models, as from `look`: here the found models, with the marks of their files."""
    return {folder.name: (folder, marks(folder)) for folder in found}


def mark_of(files: Iterable[tuple[str, int, int]]) -> Mark:
    """The mark of these files: path, time of modification or an equivalent number, and size."""
    listed = frozenset(files)
    return Mark(hash(listed), len(listed), sum(size for _, _, size in listed))


def part_of(path: str) -> str:
    """The part of a model to which the file with this path in the model's folder belongs."""
    first, _, others = path.partition("/")
    is_versions = first.isdecimal() and bool(others)
    within = others if is_versions else path
    folder, _, name = within.rpartition("/")
    if within == CONFIG_FILE or (folder == NAMED_CONFIGS and name.endswith(".pbtxt")):
        return CONFIGURATION
    return first if is_versions else REST


def marks_of(folder: Path, beginning: str) -> Mark:
    """The mark of the files directly in a folder whose names begin with `beginning`."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(beginning) and entry.is_file():
                about = entry.stat()
                found.append((entry.name, about.st_mtime_ns, about.st_size))
    return mark_of(found)


def _scan_one(repository: Path, but: Set[str]) -> list[ModelFolder]:
    try:
        names, _ = folders_in(str(repository))
    except OSError as error:
        raise _unreadable(repository, error) from error
    found = []
    for name in names:
        if name in but or _is_no_model(name):
            continue
        folder = _model_folder(repository / name, repository)
        if folder is None:
            continue
        if folder.is_empty:
            log.warning("%s: ignored: the folder is empty", folder.path)
        else:
            found.append(folder)
    return found


def _unreadable(repository: Path, error: OSError) -> ServerError:
    family = Exhausted if error.errno in LACKS else ConfigError
    return family(f"model repository '{repository}' cannot be read: {system_says(error).lower()}")


def _is_no_model(name: str) -> bool:
    return name.startswith(".") or name in NOT_MODELS


def _shown(name: str) -> str:
    """The name of a folder as text that has no bytes but UTF-8."""
    return name if name.isascii() else name.encode(errors="surrogateescape").decode(errors="replace")


def _model_folder(path: Path, repository: Path) -> ModelFolder | None:
    """A model's folder; None if it is no folder, or there is none.

    Raises:
        Exhausted: the server has no descriptor or no memory to look at it.
    """
    name = _shown(path.name)
    try:
        listed = _list(path)  # once: a start does this twice for every model
    except OSError as error:
        if error.errno in LACKS:
            raise Exhausted(f"{path}: {system_says(error).lower()}") from error
        if error.errno in NOTHING_THERE:
            return None
        return ModelFolder(name, path, repository, problem=f"{path}: {system_says(error).lower()}")
    try:
        check_name(name)
    except InvalidArgument as error:
        return ModelFolder(name, path, repository, problem=str(error), is_empty=listed.is_empty)
    return ModelFolder(name, path, repository, listed.versions, misnamed=listed.misnamed, is_empty=listed.is_empty)


class _Listed(NamedTuple):
    """A model's folder: its versions in ascending order, the other folders in it, whether it is empty."""

    versions: tuple[int, ...]
    misnamed: tuple[str, ...]
    is_empty: bool


def _list(path: Path) -> _Listed:
    versions: list[int] = []
    others: list[str] = []
    names, is_empty = folders_in(str(path))
    for name in names:
        if _why_none(name):
            others.append(name)
        else:
            versions.append(int(name))
    return _Listed(tuple(sorted(versions)), tuple(sorted(others)), is_empty)


def versions_of(path: Path) -> tuple[int, ...]:
    """The versions of a model folder, ascending."""
    return _list(path).versions


def is_version(name: str) -> bool:
    """Whether a folder of this name is a version."""
    return not _why_none(name)


def version_folder(path: Path) -> Path | None:
    """The version's folder of a path: itself, or the one that the file lies in; None without one."""
    folder = path if path.is_dir() else path.parent
    return folder.absolute() if is_version(folder.absolute().name) else None


def is_model_folder(path: Path) -> bool:
    """Whether a path looks like a model's folder."""
    return path.is_dir() and ((path / CONFIG_FILE).is_file() or bool(versions_of(path)))


def warn_misnamed_versions(folder: ModelFolder) -> None:
    """Log a line for each folder in a model's folder that looks like a version but is none."""
    for name, why in _misnamed(folder):
        log.warning("%s: ignored: %s", folder.shown(str(folder.path / name)), why)


def _misnamed(folder: ModelFolder) -> Iterator[tuple[str, str]]:
    """The folders in a model's folder that look like versions, each with the reason why it is none."""
    misnamed = folder.misnamed
    if misnamed is None:
        misnamed = _list(folder.path).misnamed if folder.path.is_dir() else ()
    for name in misnamed:
        if name not in NOT_VERSIONS | NOT_MODELS and not name.startswith("."):
            yield name, _why_none(name)


def _why_none(name: str) -> str:
    """Why a folder with this name is no version; empty if it is one."""
    if not (name.isascii() and name.isdigit()) or int(name) > MAX_VERSION:
        return f"the name of a version is a number up to {MAX_VERSION}"
    is_padded = len(name) > 1 and name.startswith("0")
    return f"the name of a version has no leading zeros, rename it to {int(name)}" if is_padded else ""


def select_versions(config: pb.ModelConfig, folder: ModelFolder) -> list[int]:
    """The versions to serve under the configuration's version policy, ascending.

    Raises:
        ConfigError: the policy selects no version.
    """
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            chosen = list(folder.versions)
        case "specific":
            wanted = set(policy.specific.versions)
            chosen = [version for version in folder.versions if version in wanted]
            for version in sorted(wanted - set(chosen)):
                path = folder.shown(str(folder.path))
                log.warning("%s: version %d is configured but has no folder", path, version)
        case _:
            chosen = list(folder.versions[-max(1, policy.latest.num_versions) :])
    if not chosen:
        there = f"versions with a folder: {', '.join(map(str, folder.versions)) or 'none'}"
        if not folder.versions and folder.path.is_dir() and any(map(is_model_folder, folder.path.iterdir())):
            there += f"; it holds models itself: give it as --model-repository {folder.path}"
        elif not folder.versions and (padded := [each for each in _misnamed(folder) if each[0].isdigit()]):
            there += "".join(f"; {name} is ignored: {why}" for name, why in padded)
        elif not folder.versions and config.HasField("ensemble_scheduling"):
            there += f"; an ensemble has no file, but needs an empty folder as its version: mkdir {folder.path}/1"
        elif not folder.versions:
            there += f"; the model's file belongs into a folder whose name is the version, such as {folder.path}/1"
        raise ConfigError(
            f"{folder.path}: at least one version must be available under the version policy of model "
            f"'{folder.name}': {there}"
        )
    return chosen
