"""A repository on the real file system, which an operator changes, and what the server sees of it.

The server reads it natively (`_native/model_files.pyx`, `_native/file_contents.pyx`). What there is to see is found out
here a second time, with Python's own ways to the file system. Times of modification are the simulation's.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from inferd._native.file_contents import find_beginning, read_regular
from inferd._native.model_files import Mark, Watch, folders_in, look_at_parts
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SHARE = 0.25  # of simulations that have one
MODELS = ("one", "two", ".hidden", "__pycache__", "lost", "größe", "b\udcffd")
FOLDERS = ("1", "2", "17", "1x", "configs", "warmup", "__pycache__", ".git", "deep", "deeper")
FILES = ("config.pbtxt", "a.pbtxt", ".pbtxt", "model.py", ".hidden", "weights", "big")
MANY = 80  # folders: more than there is room for at first
REFUSED = 0.3  # of what is looked at: it is looked at before, while this take of memory is refused, or one before
TAKES = 25
BEGINNINGS = (b"", b"\x89PNG", b"magic" * 10)
FEW = 6  # files of a model that are looked at, where there may be more
DEEDS = 8
VISITS = 4  # in a simulation, at most
Seen = dict[str, frozenset[tuple[str, int, int]]]  # paths, times and sizes, by part


class Library:
    """The repository of a simulation.

    Args:
        simulation: in which the operator changes it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"{simulation.outcome.seed} library")
        self.on = simulation.has("library", SHARE, when=simulation.scale.library)
        self._clock = 0
        self._left = VISITS
        self._states: dict[str, dict[str, object]] = {}  # by model, what was seen, and the digests
        self._watch = Watch()

    def visit(self) -> None:
        """Change it, and look at it, some times.

        Raises:
            Violation: the server does not see what there is.
        """
        if not self.on or not self._left or self._random.random() < 0.5:
            return
        self._left -= 1
        root = Path(tempfile.mkdtemp(prefix="inferd-library"))
        try:
            self._states.clear()
            for _ in range(self._random.randint(1, DEEDS)):
                for _ in range(self._random.randint(1, 5)):
                    self._change(root)
                self._look(root)
                self._read(root)
            self._end(root)
        finally:
            shutil.rmtree(root)

    # -- the operator's

    def _change(self, root: Path) -> None:
        """Make, change or remove something."""
        random = self._random
        folder = root / random.choice(MODELS)
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            folder = folder / random.choice(FOLDERS)
        deed = random.random()
        try:
            if deed < 0.15:
                shutil.rmtree(folder)
                return
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / random.choice((*FILES, *FOLDERS[:4]))
            if deed < 0.3:
                target = random.choice((root, root / "one", folder, Path("..", "2"), Path("nowhere"), path, Path("..")))
                path.symlink_to(target)
            elif deed < 0.31:
                for number in range(MANY):
                    (folder / f"many {number}").mkdir()
            elif deed < 0.35:
                os.mkfifo(path)
                self._touch(path)
            elif deed < 0.45:
                path.unlink()
            elif path.is_file() or not path.exists():  # to open a FIFO would wait
                content = random.choice(BEGINNINGS) + bytes(random.choice((0, 3, 100, 5000)))
                path.write_bytes(content)
                self._touch(path)
        except OSError:
            pass  # it is not there, or it is something else

    def _touch(self, path: Path) -> None:
        self._clock += 1
        os.utime(path, ns=(self._clock, self._clock * 1_000_000_007))

    # -- what there is

    def _look(self, root: Path) -> None:
        random = self._random
        crowded = random.random() < 0.3
        most = FEW if crowded else 1000
        names = self._listed(str(root))
        if names is None:
            return
        but = {"lost"} if random.random() < 0.5 else set()
        states = self._try(lambda: self._watch.look(str(root), but, most))
        expected = {name for name in names if not name.startswith(".") and name != "__pycache__" and name not in but}
        expected = {name for name in expected if not is_empty(root / name)}
        if states is None:
            return
        if set(states) != expected:
            raise Violation(f"models {sorted(states)}, where there are {sorted(expected)}")
        for name, state in states.items():
            self._look_at(root / name, name, state, most)

    def _look_at(self, path: Path, name: str, state: int, most: int) -> None:
        found = self._try(lambda: look_at_parts(str(path), most))
        if found is None:
            return
        marks, is_crowded = found
        seen, folders = walk(path)
        count = sum(len(files) for files in seen.values())
        if is_crowded != (count > most):
            raise Violation(f"'{name}' is crowded: {is_crowded}, with {count} files where {most} are looked at")
        if is_crowded:
            return
        told = {part: (mark.files, mark.size) for part, mark in marks.items()}
        there = {part: (len(files), sum(size for *_, size in files)) for part, files in seen.items()}
        if told != there:
            raise Violation(f"'{name}' has {told}, where there is {there}")
        before = self._states.get(name)
        self._states[name] = {"seen": seen, "folders": folders, "marks": marks, "state": state}
        if before is None:
            return
        for part in seen.keys() & before["seen"].keys():  # type: ignore[attr-defined]
            was: Mark = before["marks"][part]  # type: ignore[index]
            is_same = seen[part] == before["seen"][part]  # type: ignore[index]
            if (marks[part] == was) != is_same:
                raise Violation(f"'{name}' part {part}: {was} then, {marks[part]} now, and it is the same: {is_same}")
        is_same = seen == before["seen"] and folders == before["folders"]
        if (state == before["state"]) != is_same:
            raise Violation(f"'{name}': state {before['state']} then, {state} now, and it is the same: {is_same}")

    def _listed(self, path: str) -> list[str] | None:
        found = self._try(lambda: folders_in(path))
        if found is None:
            return None
        names, empty = found
        there = sorted(entry.name for entry in os.scandir(path) if Path(entry.path).is_dir())
        if sorted(names) != there or empty != is_empty(Path(path)):
            raise Violation(f"folders {sorted(names)}, and none: {empty}, where there are {there}")
        return names

    def _try(self, look):  # type: ignore[no-untyped-def]
        """What it finds; None: there was no memory for it."""
        if self._random.random() < REFUSED and not self._simulation.is_faulty:
            self._refuse(look, self._random.randint(1, TAKES))
        found, has_memory = self._found(look)
        if not (has_memory or self._simulation.is_faulty):
            raise Violation("there is no memory to look at files")
        return found

    def _found(self, look):  # type: ignore[no-untyped-def]
        """What it finds, and whether there was memory for it."""
        world = self._simulation.world
        before = world.may_fail(1)
        try:
            return look(), True
        except MemoryError:
            return None, False
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return None, False
        finally:
            world.may_fail(before)

    def _refuse(self, look, take: int) -> None:  # type: ignore[no-untyped-def]
        """Look while one take of memory is refused: nothing is found then, or what is found with it."""
        world = self._simulation.world
        failed = world.failed_takes
        world.fail_at(take, 1)
        try:
            found, has_memory = self._found(look)
        except OSError:
            return  # of the files, and so it will be again
        finally:
            world.fail_at(0, 0)
        if not has_memory and world.failed_takes == failed:
            raise Violation("there is no memory to look at files, and none was refused")
        if has_memory and found != self._found(look)[0] and not isinstance(found, dict):
            raise Violation(f"with one take of memory refused {found} is found, and {self._found(look)[0]} else")

    # -- contents

    def _read(self, root: Path) -> None:
        random = self._random
        files = [path for path in sorted(root.rglob("*")) if "." not in path.parts]
        for path in random.sample(files, min(4, len(files))):
            limit = random.choice((0, 5, 103, 1 << 20))
            try:
                content = self._try(lambda path=path, limit=limit: read_regular(str(path), limit))
            except OSError as error:
                if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOENT, errno.ELOOP):
                    raise Violation(f"{path.name} cannot be read: {error}") from error
                continue
            if content is not None and content != path.read_bytes()[: limit + 1]:
                raise Violation(f"{path.name} has {len(content)} bytes, as read up to {limit}")
        for path in [path for path in files if path.is_dir()][:3]:
            self._find(path)
        for path, expected in ((root / "nowhere", FileNotFoundError), (Path("a\0b"), ValueError)):
            for look in (folders_in, lambda path: read_regular(path, 1), lambda path: find_beginning(path, b"a", 9)):
                refuses(look, str(path), expected)
        refuses(lambda path: find_beginning(path, b"a" * 257, 9), str(root), ValueError)

    def _find(self, folder: Path) -> None:
        beginning = self._random.choice(BEGINNINGS)
        below = self._random.choice((1, 60, 1 << 20))
        files = [entry for entry in os.scandir(folder) if Path(entry.path).is_file()]
        names = [entry.name for entry in files if entry.stat().st_size < below]
        good = [name for name in names if (folder / name).read_bytes().startswith(beginning)]
        found = self._try(lambda: find_beginning(str(folder), beginning, below))
        if found != min(good, key=os.fsencode, default=None) and not (found is None and self._simulation.is_faulty):
            raise Violation(f"'{found}' begins so, where {sorted(good)} do")

    def _end(self, root: Path) -> None:
        """After the end of a watch nothing is looked at."""
        if self._random.random() < 0.3:
            self._watch.end()
            models = [entry.name for entry in os.scandir(root) if Path(entry.path).is_dir() and entry.name[0] != "."]
            if set(models) - {"__pycache__"} and not self._simulation.is_faulty:
                refuses(lambda path: self._watch.look(path, (), 9), str(root), InterruptedError)
            self._watch = Watch()


def refuses(look, path: str, expected: type[Exception]) -> None:  # type: ignore[no-untyped-def]
    """Check that it is refused so."""
    try:
        look(path)
    except expected:
        return
    raise Violation(f"{path!r} is looked at, and has to be refused as {expected.__name__}")


def is_empty(folder: Path) -> bool:
    """Whether it has nothing but hidden files."""
    return all(entry.name.startswith(".") for entry in os.scandir(folder))


def walk(top: Path) -> tuple[Seen, frozenset[str]]:
    """The files of a model by their parts, and the names of folders in it: each folder once, by the path that is last
    in order, and none that is around the model's."""
    parts: dict[str, set[tuple[str, int, int]]] = {"configuration": set(), "rest": set()}
    around: set[tuple[int, int]] = set()
    seen = {identity(top)}
    left: list[tuple[str, str, str]] = [("", "rest", "head")]
    names: set[str] = set()
    is_first = True
    while left:
        path, part, kind = left.pop()
        folder = top / path
        if not is_first:
            try:
                key = identity(folder)
            except OSError:
                continue
            if key in seen or key in around:
                continue
            seen.add(key)
        is_first = False
        inner = []
        for entry in os.scandir(folder):
            name = entry.name
            if name.startswith(".") or name == "__pycache__":
                continue
            try:
                about = entry.stat()
            except OSError:
                continue
            within = f"{path}/{name}" if path else name
            if not stat.S_ISDIR(about.st_mode):
                parts[kind_of(kind, name) or part].add((within, about.st_mtime_ns, about.st_size))
                continue
            if entry.is_symlink() and not around:
                around = {identity(parent) for parent in top.resolve().parents}
            if not path:
                names.add(name)
            inner_kind, inner_part = "inner", part
            if kind == "head" and name == "configs":
                inner_kind = "configs"
            elif not path and name.isascii() and name.isdigit():
                inner_kind, inner_part = "head", name
                parts[name] = set()
            inner.append((within, inner_part, inner_kind))
        left += sorted(inner, key=lambda each: os.fsencode(each[0]))
    return {part: frozenset(files) for part, files in parts.items()}, frozenset(names)


def kind_of(kind: str, name: str) -> str:
    """The part of the configuration, if a file of this name belongs to it; else empty."""
    is_config = (
        name == "config.pbtxt" if kind == "head" else kind == "configs" and name.endswith(".pbtxt") and len(name) > 6
    )
    return "configuration" if is_config else ""


def identity(path: Path) -> tuple[int, int]:
    """The folder itself, whatever path leads there."""
    about = path.stat()
    return about.st_dev, about.st_ino
