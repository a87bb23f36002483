"""A repository in an object store, copied to this machine model by model.

A load copies the model into a private folder. When the copy is complete, and the store still lists the model as before,
the folder is renamed to its place. So no load sees an incomplete model, and versions of an older copy serve until the
new ones do. A file with the same ETag as before is not copied again: the new folder shares it with the old one, and a
version whose files have not changed stays loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from inferd._native.model_files import Watch
from inferd.backends.temporary import TemporaryFolder, remove_left_folders
from inferd.server.engine.repository import folders
from inferd.server.engine.repository.folders import CONFIGURATION, REST, Marks, ModelFolder, mark_of, part_of
from inferd.server.engine.repository.remote.stores import MOUNTS, explained, open_store, parse_url
from inferd.server.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger("inferd.repository")

TRIES = 3
"""How many times a model that changes during its copy is copied."""
TRANSFERS = 4
"""How many models are copied at a time."""
CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Object:
    """A file in the store."""

    tag: str
    size: int


Listing = Mapping[str, Object]
"""The files of a model by their paths in its folder."""


@dataclass(slots=True)
class _Shared:
    """A lock, and how many threads hold it or wait for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class _Changed(Exception):
    """The model has changed since its copy began."""


class CloudSource:
    """An `inferd.server.engine.repository.sources.RepositorySource` in an object store.

    Args:
        url: of the repository.
        environment: has the credentials.
    """

    def __init__(self, url: str, environment: Mapping[str, str] = os.environ) -> None:
        self._url = url.rstrip("/")
        address = parse_url(url)
        self._store: ObjectStore = open_store(url, environment)
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        mount = environment.get(MOUNTS[address.scheme], "")
        if mount:  # the start has looked into the system's temporary folder
            remove_left_folders(mount)
        self._held = TemporaryFolder("copies", mount)
        self._root = self._held.path / "models"
        self._root.mkdir()
        self._guard = threading.Lock()
        self._locks: dict[str, _Shared] = {}  # of models in use by a thread
        self._transfers = threading.Semaphore(TRANSFERS)
        self._copies: dict[str, list[tuple[ModelFolder, Listing]]] = {}  # copies of each model, the newest first

    def __str__(self) -> str:
        return self._url

    def scan(self, but: Set[str] = frozenset()) -> list[ModelFolder]:
        """See RepositorySource. Copies nothing: the folders do not exist yet."""
        models: dict[str, dict[str, Object]] = {}
        for path, found in self._list(""):
            name, _, file = path.partition("/")
            if file and name not in but and not name.startswith(".") and name not in folders.NOT_MODELS:
                models.setdefault(name, {})[file] = found
        present = [self._folder(name, self._root / name, listing) for name, listing in models.items()]
        return sorted(present, key=lambda folder: folder.name)

    def has(self, name: str) -> bool:
        """See RepositorySource."""
        return _is_name(name) and next(self._list(f"{name}/"), None) is not None

    def look(self, watch: Watch) -> dict[str, object]:  # noqa: ARG002
        """See RepositorySource. Copies nothing."""
        return folders.states(self.scan())

    def find(self, name: str) -> ModelFolder | None:
        """See RepositorySource. Copies the model, unless the newest copy equals the store's."""
        if not _is_name(name):
            return None
        with self._alone(name):
            for _ in range(TRIES):
                listing = dict(self._list(f"{name}/"))
                if not listing:
                    return None
                copies = self._copies.get(name, [])
                if copies and copies[0][1] == listing:
                    return copies[0][0]
                try:
                    return self._copy(name, listing)
                except _Changed:
                    log.info("%s/%s has changed while it was copied", self._url, name)
                except OSError as error:
                    raise ConfigError(f"{self._url}/{name}: {(error.strerror or str(error)).lower()}") from None
        raise ConfigError(f"{self._url}/{name}: it has changed {TRIES} times while it was copied: try again later")

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Hold the lock of a model inside the block."""
        with self._guard:
            shared = self._locks.setdefault(name, _Shared())
            shared.users += 1
        try:
            with shared.lock:
                yield
        finally:
            with self._guard:
                shared.users -= 1
                if not shared.users:
                    del self._locks[name]

    def _list(self, below: str) -> Iterator[tuple[str, Object]]:
        """The objects below a folder of the repository, by their paths in it."""
        import obstore

        prefix = self._prefix + below
        try:
            for chunk in obstore.list(self._store, prefix or None):
                for found in chunk:
                    path = found["path"].removeprefix(prefix)
                    if path and not path.endswith("/"):
                        yield path, Object(found["e_tag"] or str(found["last_modified"]), found["size"])
        except Exception as error:
            raise ConfigError(f"{self._url}/{below}".rstrip("/") + f": {explained(error)}") from None

    def _copy(self, name: str, listing: Listing) -> ModelFolder:
        target = self._root / _digest(name, listing) / name
        incoming = self._root / f".{uuid.uuid4().hex}"
        before = self._copies.get(name, [])
        try:
            with self._transfers:
                for path, found in sorted(listing.items()):
                    self._have(name, path, found, incoming / name, before)
            if dict(self._list(f"{name}/")) != listing:
                raise _Changed
            shutil.rmtree(target.parent, ignore_errors=True)
            incoming.rename(target.parent)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        folder = self._folder(name, target, listing)
        others = [copy for copy in before if copy[0].path != target]
        self._copies[name] = [(folder, listing), *others[:1], *(copy for copy in others[1:] if _thin(*copy, listing))]
        return folder

    def _have(
        self, name: str, path: str, found: Object, folder: Path, before: list[tuple[ModelFolder, Listing]]
    ) -> None:
        """Put one file into the new folder: a link to the previous copy's if it is the same, otherwise a download."""
        if ".." in PurePosixPath(path).parts or "\0" in path:
            raise ConfigError(f"{self._url}/{name}: the path of an object leads out of the model's folder: {path!r}")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for old, listing in before[:1]:
            if listing.get(path) == found:
                os.link(old.path / path, target)
                return
        with target.open("xb") as file:
            size = self._fetch(f"{self._prefix}{name}/{path}", found, file.write)
            if size != found.size:
                raise ConfigError(f"{self._url}/{name}/{path}: expected {found.size} bytes, got {size}")
            file.flush()
            os.fsync(file.fileno())

    def _fetch(self, path: str, found: Object, write: Callable[[memoryview], object]) -> int:
        import obstore
        from obstore import exceptions

        size = 0
        try:
            options: obstore.GetOptions = {"if_match": found.tag} if found.tag.startswith(('"', "0x")) else {}
            for chunk in obstore.get(self._store, path, options=options).stream(min_chunk_size=CHUNK):
                view = memoryview(chunk)
                size += len(view)
                write(view)
        except (exceptions.PreconditionError, FileNotFoundError):
            raise _Changed from None
        except OSError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._url}: {path}: {explained(error)}") from None
        return size

    def _folder(self, name: str, path: Path, listing: Listing) -> ModelFolder:
        versions = {PurePosixPath(file).parts[0] for file in listing if "/" in file}
        numbers = sorted(int(version) for version in versions if folders.is_version(version))
        try:
            folders.check_name(name)
        except InvalidArgument as error:
            return ModelFolder(name, path, self._root, problem=str(error))
        origin = f"{self._url}/{name}"
        return ModelFolder(
            name,
            path,
            self._root,
            tuple(numbers),
            seen=_marks(listing, numbers),
            origin=origin,
            stands_for=((str(path), origin),),
        )

    def close(self) -> None:
        """See RepositorySource."""
        self._held.cleanup()


def _thin(folder: ModelFolder, listing: Listing, now: Listing) -> bool:
    """Remove changed files from an old copy; return whether files are left, which a loaded version may use."""
    for path, found in listing.items():
        if now.get(path) != found:
            (folder.path / path).unlink(missing_ok=True)
    left = any(now.get(path) == found for path, found in listing.items() if part_of(path) != CONFIGURATION)
    if not left:
        shutil.rmtree(folder.path.parent, ignore_errors=True)
    return left


def _marks(listing: Listing, versions: list[int]) -> Marks:
    found: dict[str, set[tuple[str, int, int]]] = {part: set() for part in (CONFIGURATION, REST, *map(str, versions))}
    for path, each in listing.items():
        mark = int.from_bytes(hashlib.sha256(each.tag.encode()).digest()[:8], "big")
        found.setdefault(part_of(path), set()).add((path, mark, each.size))
    return {part: mark_of(files) for part, files in found.items()}


def _digest(name: str, listing: Listing) -> str:
    text = name + "\n".join(f"{path}\0{found.tag}\0{found.size}" for path, found in sorted(listing.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_name(name: str) -> bool:
    try:
        folders.check_name(name)
    except InvalidArgument:
        return False
    return True
