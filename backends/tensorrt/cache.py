"""The cache of builds: plans, and the timings by which TensorRT chose kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inferd._native.cuda.device import Device
from inferd.backends.api import EngineSpec
from inferd.backends.onnx_files import named_files
from inferd.backends.tensorrt.library import Library

CHUNK = 1 << 20


def usual_folder() -> Path:
    """The default folder of plans."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inferd" / "tensorrt"


class PlanCache:
    """A folder of plans. Whoever can write to it can run code in the server, so it is made for its user alone.

    Plans are never removed: the folder may be deleted at any time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[Path]:
        """The path of a plan's file. Until the context ends, a lock keeps other processes from building this plan."""
        with (self.folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.folder / f"{key}.plan"

    def timings(self, library: Library, gpu: str) -> Path:
        """The file of timings that were measured by this TensorRT on such a GPU."""
        return self.folder / f"timings-{library.name}-{library.version}-{re.sub(r'[^A-Za-z0-9]+', '_', gpu)}"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that readers see all of it or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def gpu_of(spec: EngineSpec, gpu: Device | None) -> str:
    """What the plan is built for, as text: a GPU, on which TensorRT measures its kernels, or a compute capability."""
    if gpu is None:
        return f"compute capability {spec.compute_capability}"
    return f"{gpu.name} {'.'.join(map(str, gpu.compute_capability))}"


def key_of(spec: EngineSpec, library: Library, gpu: str) -> str:
    """The key of a build. It changes with everything on which the plan depends.

    Weights may lie in other files: beside the model, or where the model says. Of these the key has name, size and time
    of modification.
    """
    digest = hashlib.sha256()
    settings = dataclasses.replace(spec, model=Path(), cache=None, device=0, runtime="")
    digest.update(f"{library} {gpu} {settings}\n".encode())
    with spec.model.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    folder = spec.model.parent
    names = {each.name for each in folder.iterdir() if each.suffix not in (".onnx", ".plan", ".pbtxt")}
    for name in sorted(names | {name for name in named_files(spec.model) if "\0" not in name}):
        if (folder / name).is_file():
            found = (folder / name).stat()
            digest.update(f"\n{name} {found.st_size} {found.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]
