"""A server of its own, with a copy of the model whose configuration can be changed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from inferd.server.errors import Misused
from inferd.server.tools.reach import CallFailed, Reach
from inferd.server.tools.tune.configurations import OF_PROCESS, threads_of
from inferd.server.tools.tune.search import Wanted
from inferd_client.pb import model_config_pb2 as pb
from inferd_client.utils import InferenceServerException

CONFIG = "config.pbtxt"
START_SECONDS = 300.0
END_SECONDS = 10.0
LONGEST_SOCKET = 107
"""Bytes of a unix socket's path, by Linux."""


class Trial:
    """A server with copies of the models, whose configurations can be changed, and the repository's other models."""

    def __init__(self, wanted: Wanted, folder: Path) -> None:
        self._wanted = wanted
        self._models = folder / "models"
        self._socket = folder / "tune.sock"
        if len(os.fsencode(self._socket)) > LONGEST_SOCKET:
            raise Misused(f"tune: {folder} is too long for the path of a socket: set TMPDIR to a shorter folder")
        self._log = folder / "log"
        self.reach = Reach(url=f"unix:{self._socket}", timeout=START_SECONDS)
        self._threads = frozenset[str]()  # of the running process
        for name in wanted.models:
            copy_model(wanted.repository / name, self._models / name)
        for path in wanted.repository.iterdir():
            if path.is_dir() and path.name not in wanted.models:
                (self._models / path.name).symlink_to(path.resolve())

    def __enter__(self) -> Trial:
        self._start()
        return self

    def is_up(self) -> bool:
        """Whether the server's process runs."""
        return self._process.poll() is None

    def ends(self) -> bool:
        """Whether the server's process has ended or soon will. Its connections close shortly before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return not self.is_up()

    def __exit__(self, *error: Any) -> None:
        self._stop()

    def _start(self) -> None:
        command = [sys.executable, "-m", "inferd", "serve", "--model-repository", str(self._models)]
        command += ["--grpc-address", f"unix:{self._socket}", "--model-control-mode", "explicit"]
        command += ["--allow-metrics=false"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *self._wanted.options], stdout=log, stderr=subprocess.STDOUT)
        try:
            self._await_start()
        except BaseException:  # also for ^C: no other code knows the process yet
            self._stop()
            raise

    def _await_start(self) -> None:
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends and self.is_up():
            with contextlib.suppress(CallFailed, InferenceServerException), self.reach.client() as client:
                if client.is_server_live(client_timeout=1):
                    return
            time.sleep(0.05)
        raise CallFailed(f"the server does not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        finally:  # also if the wait is interrupted
            self._process.kill()
            self._process.wait()

    def configs(self) -> dict[str, pb.ModelConfig]:
        """The complete configurations of the models, and of the models of ensembles' steps."""
        found: dict[str, pb.ModelConfig] = {}
        left = list(reversed(self._wanted.models))
        with self.reach.client() as client:
            while left:
                if (name := left.pop()) in found:
                    continue
                try:
                    if name in self._wanted.models:
                        client.load_model(name)
                    config = client.get_model_config(name).config
                except InferenceServerException as error:
                    raise CallFailed(f"model '{name}' cannot be served as it is: {error.message()}") from None
                found[name] = pb.ModelConfig.FromString(config.SerializeToString())
                left += [step.model_name for step in reversed(config.ensemble_scheduling.step)]
        self._threads = _threads(found)
        return found

    def serve(self, configs: Mapping[str, pb.ModelConfig]) -> str:
        """Serve models with these configurations. Returns the reason if that fails, else an empty text.

        Raises:
            CallFailed: a configuration needs a new server process, or the former one has ended, and none starts.
        """
        if not self.is_up() or _threads(configs) != self._threads:
            self._stop()
            self._start()
            self._threads = _threads(configs)
        for name, config in configs.items():
            folder = self._models / name
            if folder.is_symlink():
                folder.unlink()
                copy_model(self._wanted.repository / name, folder)
            (folder / CONFIG).write_text(text_format.MessageToString(config))
        with self.reach.client() as client:
            try:
                for name in self._wanted.models:
                    client.load_model(name)
            except InferenceServerException as error:
                return str(error.message())
        return ""

    def unload(self) -> None:
        """Stop serving, and free the memory."""
        with self.reach.client() as client, contextlib.suppress(InferenceServerException):
            for name in self._wanted.models:
                client.unload_model(name, unload_dependents=True)

    def memory_mb(self) -> int:
        """The memory of the server and its workers: private pages, and their share of shared ones."""
        return sum(_proportional(process) for process in _family(self._process.pid)) >> 20


def _threads(configs: Mapping[str, pb.ModelConfig]) -> frozenset[str]:
    """The numbers of threads that whole processes have."""
    return frozenset(threads_of(each) for each in configs.values() if each.backend in OF_PROCESS)


def copy_model(source: Path, target: Path) -> None:
    """Copy a model's folder, with hard links to its files if possible.

    Raises:
        Misused: the folder does not exist, or cannot be copied.
    """
    if not source.is_dir():
        raise Misused(f"tune: there is no folder {source}: --model-repository says where models are")
    try:
        shutil.copytree(source, target, copy_function=_linked)
    except shutil.Error as error:
        path, _, why = error.args[0][0]
        raise Misused(f"tune: {source} cannot be copied: {path}: {why}") from None


def _linked(source: str, target: str) -> None:
    """Link a file instead of copying it if possible, but copy files that the search changes."""
    if Path(source).name != CONFIG:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _family(process: int) -> Iterator[int]:
    yield process
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _proportional(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
