"""Repository sources: folders of model folders, and a single model as a repository of one.

A source lists its models (`scan`) and finds one of them (`find`). `Repositories` combines all sources. All functions
block; several threads may call them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from google.protobuf import text_format

from inferd._native.model_files import Watch
from inferd.backends.loader import BUILTIN, model_files
from inferd.backends.temporary import TemporaryFolder
from inferd.server.engine.pbtxt.parse import parse_file
from inferd.server.engine.repository import folders
from inferd.server.engine.repository.folders import (
    AMBIGUOUS,
    CONFIG_FILE,
    Marks,
    ModelFolder,
    is_model_folder,
    version_folder,
    versions_of,
)
from inferd.server.engine.repository.remote.hub import HUB, download, name_of
from inferd.server.engine.repository.remote.mirror import CloudSource
from inferd.server.engine.repository.remote.stores import SCHEMES
from inferd.server.errors import ConfigError, Exhausted, ServerError
from inferd_client.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.repository")


class RepositorySource(Protocol):
    """A source of models; `str` returns the operator's spelling."""

    def scan(self, but: Set[str] = frozenset()) -> list[ModelFolder]:
        """The source's models, without those of these names.

        Raises:
            ConfigError: the source cannot be read.
        """

    def look(self, watch: Watch) -> dict[str, object]:
        """The present state of each model; it differs whenever the model has changed.

        Args:
            watch: ends the look early.

        Raises:
            ConfigError, Exhausted: the source cannot be read.
            InterruptedError: `watch` was told to end.
        """

    def find(self, name: str) -> ModelFolder | None:
        """The present model, on this machine; None if the source does not have it.

        Raises:
            ConfigError: the model cannot be fetched now; an earlier copy stays as it was.
        """

    def has(self, name: str) -> bool:
        """Whether the source has the model; copies nothing to this machine.

        Raises:
            ConfigError: the source cannot be read.
        """

    def close(self) -> None:
        """Remove what was kept on this machine."""


class FolderSource:
    """A folder of model folders."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def scan(self, but: Set[str] = frozenset()) -> list[ModelFolder]:
        """See RepositorySource."""
        return folders.scan([self._path], but)

    def look(self, watch: Watch) -> dict[str, object]:
        """See RepositorySource."""
        return folders.look(self._path, watch)

    def find(self, name: str) -> ModelFolder | None:
        """See RepositorySource."""
        return folders.find([self._path], name)

    def has(self, name: str) -> bool:
        """See RepositorySource."""
        return self.find(name) is not None

    def close(self) -> None:
        """See RepositorySource."""


def _model_names() -> dict[str, str]:
    """The usual name of a model's file by its suffix."""
    names = (name for backend in BUILTIN for name in model_files(backend).values() if name)
    return {Path(name).suffix: name for name in names}


MODEL_NAMES = _model_names()


class SingleModelSource:
    """One model as a repository: its file, a folder with its file, or its folder.

    A model's folder that has the model's name is served as it is. Otherwise the model gets a folder in a temporary one,
    with links to the given files; messages have the paths of the given files.

    Args:
        path: of the file or folder.
        name: of the model; empty: the configured one, else that of the file without its suffix, or of the folder.
        usual: the default name in place of the folder's.
    """

    def __init__(self, path: Path, name: str = "", usual: str = "") -> None:
        self._path = path
        self._file = path if path.is_file() else lone_model_file(path)
        self._name = name or _name_of(path, usual)
        folders.check_name(self._name)
        self._is_renamed = bool(name)
        self._held = TemporaryFolder("model")
        self._root = self._held.path

    def __str__(self) -> str:
        return str(self._path)

    def scan(self, but: Set[str] = frozenset()) -> list[ModelFolder]:
        """See RepositorySource."""
        found = None if self._name in but else self.find(self._name)
        return [found] if found else []

    def look(self, watch: Watch) -> dict[str, object]:  # noqa: ARG002
        """See RepositorySource."""
        return folders.states(self.scan())

    def find(self, name: str) -> ModelFolder | None:
        """See RepositorySource."""
        if name != self._name:
            return None
        model = self._path.resolve()
        try:
            if self._file is not None or model.name != name:
                model = self._root / name
                self._lay(model)
            folder = folders.find([model.parent], name)
            if folder is None or not self._path.exists():
                raise ConfigError(f"{self._path}: there is no such file or folder any more")
            return replace(
                folder,
                renamed=self._is_renamed,
                is_bare=self._file is not None,
                seen=self._marks(folder.path),
                stands_for=self._given(folder.path),
            )
        except OSError as error:
            raise ConfigError(f"{self._path}: {(error.strerror or str(error)).lower()}") from None

    def has(self, name: str) -> bool:
        """See RepositorySource."""
        return name == self._name and self._path.exists()

    def _lay(self, model: Path) -> None:
        """Update the model's folder from its source."""
        if self._file is None:
            if not model.is_symlink():
                model.symlink_to(self._path.resolve(), target_is_directory=True)
            return
        version = model / "1"
        model.mkdir(exist_ok=True)
        source = self._path / CONFIG_FILE
        if self._file.is_symlink():  # only a link with the usual name may lead elsewhere
            version.mkdir(exist_ok=True)
            link = version / MODEL_NAMES[self._file.suffix]
            if not link.is_symlink():
                link.symlink_to(self._file.resolve())
            text = ""
        else:
            if not version.is_symlink():
                version.symlink_to(self._file.parent.resolve(), target_is_directory=True)
            text = text_format.MessageToString(pb.ModelConfig(default_model_filename=self._file.name))
        if not self._path.is_file() and source.is_file():
            text = source.read_text(errors="surrogateescape")
        target = model / CONFIG_FILE
        if not target.is_file() or target.read_text(errors="surrogateescape") != text:
            target.write_text(text, errors="surrogateescape")

    def _given(self, model: Path) -> tuple[tuple[str, str], ...]:
        """See ModelFolder.stands_for; a path that begins with another comes before it."""
        if self._file is None:
            return ((str(model), str(self._path)),) if self._root in model.parents else ()
        version, config = model / "1", str(self._path / CONFIG_FILE)
        if self._path.is_file():
            config = f"{self._path}: there is no {CONFIG_FILE}, `inferd models init {self._path}` makes one"
        file = ((str(version / MODEL_NAMES[self._file.suffix]), str(self._file)),) if self._file.is_symlink() else ()
        folder = (str(version), str(self._file.parent)), (str(model / CONFIG_FILE), config)
        return *file, *folder, (str(model), str(self._path))

    def _marks(self, model: Path) -> Marks | None:
        """The marks of a single file, and of files beside it whose names begin with its own."""
        if self._file is None:
            return None
        found = folders.marks_of(self._file.parent, self._file.stem)
        configuration = folders.marks_of(model, CONFIG_FILE)
        return {folders.CONFIGURATION: configuration, folders.REST: folders.mark_of(()), "1": found}

    def close(self) -> None:
        """See RepositorySource."""
        self._held.cleanup()


def _name_of(path: Path, usual: str) -> str:
    """The default name of the model."""
    version = version_folder(path)
    if version is not None and (path.is_dir() or path.name == MODEL_NAMES[path.suffix]):
        return version.parent.name
    return path.stem if path.is_file() else _configured_name(path) or usual or path.resolve().name


def is_single(path: Path) -> bool:
    """Whether a path is one model and not a folder of model folders."""
    try:
        if not path.is_dir():
            return path.is_file() and path.suffix in MODEL_NAMES
        return (path / CONFIG_FILE).is_file() or _has_versions(path) or lone_model_file(path) is not None
    except OSError:
        return False  # a scan will report the error


def _has_versions(path: Path) -> bool:
    return bool(versions_of(path)) and any(entry.name.startswith("model.") for entry in path.glob("[0-9]*/*"))


def lone_model_file(path: Path) -> Path | None:
    """The model's file in a folder without versions' folders; None without one.

    Its name is a usual one, or it is the only file with the suffix of a model, and no program.
    """
    if not path.is_dir() or versions_of(path) or any(is_model_folder(entry) for entry in path.iterdir()):
        return None
    files = sorted(entry for entry in path.iterdir() if entry.is_file() and entry.suffix in MODEL_NAMES)
    usual = [file for file in files if file.name == MODEL_NAMES[file.suffix]]
    other = [file for file in files if file.suffix != ".py"]
    return usual[0] if len(usual) == 1 else other[0] if not usual and len(other) == 1 else None


def _configured_name(path: Path) -> str:
    """The model's name in the folder's configuration; empty if it has none, or cannot be read."""
    try:
        return parse_file(path / CONFIG_FILE, path)[0].name
    except ConfigError:
        return ""  # the load will report it


class Repositories:
    """All sources from which models come.

    Args:
        sources: paths are folders of model folders.
    """

    def __init__(self, sources: Iterable[RepositorySource | Path]) -> None:
        self.unreached: set[str] | None = None  # models that could not be fetched lately; None: not recorded
        self._seen: dict[RepositorySource, dict[str, object]] = {}  # the last look at each source that could be read
        paths: set[str] = set()
        self._sources: list[RepositorySource] = []
        for source in sources:
            if not isinstance(source, Path):
                self._sources.append(source)
            elif (resolved := os.path.realpath(source)) not in paths:
                paths.add(resolved)
                self._sources.append(FolderSource(source))

    def __str__(self) -> str:
        return ", ".join(map(str, self._sources))

    def scan(self, but: Set[str] = frozenset()) -> list[ModelFolder]:
        """The models of all sources, by name. A name found in two of them is listed once, with the problem AMBIGUOUS.

        Args:
            but: names of models to leave out, unless two sources have them.

        Raises:
            ConfigError: a source cannot be read.
        """
        found: dict[str, ModelFolder] = {}
        for source in self._sources:
            for folder in source.scan(but if len(self._sources) == 1 else frozenset()):
                known = found.get(folder.name)
                found[folder.name] = replace(known, problem=AMBIGUOUS) if known else folder
        return [found[name] for name in sorted(found) if name not in but or found[name].problem == AMBIGUOUS]

    def look(self, watch: Watch) -> dict[str, object]:
        """The present state of each model of all sources, another one whenever the model has changed.

        A source that cannot be read now counts as it was at the last look, and the log says so.

        Args:
            watch: ends the look early.

        Raises:
            ConfigError, Exhausted: no source can be read now, or one could not be read at the first look either.
            InterruptedError: `watch` was told to end.
        """
        errors: list[ServerError] = []
        for source in self._sources:
            try:
                self._seen[source] = source.look(watch)
            except (ConfigError, Exhausted) as error:
                if source not in self._seen:
                    raise
                errors.append(error)
        if errors and len(errors) == len(self._sources):
            raise errors[0]
        for each in errors:
            log.error("%s; its models stay as they are", each)
        found: dict[str, object] = {}
        for source in self._sources:
            for name, state in self._seen[source].items():
                found[name] = (found[name], state) if name in found else state
        return found

    def find(self, name: str) -> ModelFolder | None:
        """The model of this name, with the problem AMBIGUOUS if two sources have it; None if none has.

        A source that cannot be read now, and had no such model at the last look, has none.

        Raises:
            ConfigError: the model cannot be fetched now.
            Exhausted: the server has no descriptor or no memory to look at it.
        """
        found: list[ModelFolder] = []
        for source in self._sources:
            try:
                folder = source.find(name)
            except ConfigError:
                if (seen := self._seen.get(source)) is not None and name not in seen:
                    continue
                if self.unreached is not None:
                    self.unreached.add(name)
                raise
            if folder is not None:
                found.append(folder)
        if self.unreached is not None:
            self.unreached.discard(name)
        return replace(found[0], problem=AMBIGUOUS) if len(found) > 1 else found[0] if found else None

    def brought(self, listed: ModelFolder) -> ModelFolder | None:
        """A model that a scan has just listed, on this machine; it is looked for again only if it has to be fetched.

        Raises:
            ConfigError: the model cannot be fetched now.
        """
        return self.find(listed.name) if listed.origin else listed

    def has(self, name: str) -> bool:
        """Whether a source has a model of this name; False also if that cannot be found out now."""
        try:
            return any(source.has(name) for source in self._sources)
        except (ConfigError, Exhausted) as error:
            log.warning("%s", error)
            return False

    def close(self) -> None:
        """Remove what was kept on this machine."""
        for source in self._sources:
            source.close()


def open_sources(given: Sequence[str | Path], name: str = "") -> list[RepositorySource]:
    """Make the sources of these paths and URLs.

    Args:
        given: paths of folders of model folders, or of single models, or URLs of remote repositories.
        name: of the single model.
    """
    single: list[str] = []
    sources: list[RepositorySource] = []
    for url in dict.fromkeys(each for each in given if "://" in str(each)):
        if str(url).startswith(SCHEMES):
            sources.append(CloudSource(str(url)))
        elif str(url).startswith(HUB):
            path = download(str(url))
            if is_single(path):
                single.append(str(url))
                sources.append(SingleModelSource(path, name, "" if path.is_file() else name_of(str(url))))
            else:
                sources.append(FolderSource(path))
        else:
            forms = ", ".join((*SCHEMES, HUB))
            raise ConfigError(f"model-repository: {url}: expected a path, or a URL that begins with one of {forms}")
    for path in {
        os.path.realpath(path): path for path in (Path(each) for each in given if "://" not in str(each))
    }.values():
        _look_at(path)
        if is_single(path):
            single.append(str(path))
            sources.append(SingleModelSource(path, name))
        else:
            sources.append(FolderSource(path))
    if name and len(single) > 1:
        raise ConfigError(f"model-name: it names one model, and there are {', '.join(single)}")
    if name and not single:
        log.warning("--model-name=%s is ignored: the repositories are folders of model folders", name)
    return sources


_URL_OF_ONE_SLASH = re.compile(r"([a-z0-9]+):/+(.*)")


def _look_at(path: Path) -> None:
    """Check a given path; the error of a likely mistake names the right path.

    Raises:
        ConfigError: the path is a URL without one slash, a file that is no model, or a part of a model.
    """
    url = _URL_OF_ONE_SLASH.fullmatch(str(path))
    if url and f"{url[1]}://" in (*SCHEMES, HUB) and not path.exists():
        raise ConfigError(f"model-repository: {path}: write {url[1]}://{url[2]}")
    if path.is_file() and path.suffix not in MODEL_NAMES:
        known = ", ".join(sorted(MODEL_NAMES))
        raise ConfigError(f"model-repository: {path} is no model: expected a folder, or a file that ends in {known}")
    version = version_folder(path)
    if version is not None and (version.parent / CONFIG_FILE).is_file() and is_single(path):
        raise ConfigError(
            f"model-repository: {path} is of version {version.name} of a model that has a configuration: "
            f"give the model's folder, {version.parent}"
        )
