"""The interpreter of a model's workers: the server's own, or that of its parameter EXECUTION_ENV_PATH."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inferd.backends.api import BackendError
from inferd.backends.paths import OutsideError, inside
from inferd.backends.python.options import CACHE_DIRECTORY, ENVIRONMENT

log = logging.getLogger("inferd.python")

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
SERVERS_OWN = sys.executable
"""The interpreter of models that name no environment."""
COMPLETE = ".inferd-complete"
"""The file that marks an environment as unpacked completely."""

ACTIVATION_SECONDS = 60.0
"""The time for the activation scripts of an environment."""
_SOURCE = """
exec 3>&1 >&2
for script; do . "$script"; done
exec /usr/bin/env -0 >&3
"""
_SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "PS1"})
"""The variables that a shell, or activation for its prompt, sets for itself."""

SECRETS = ("INFERD_", "TRITONCACHE_")
"""Prefixes of the server's own variables: its options, the password of its cache."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter and the environment variables of its processes."""

    python: str
    variables: Mapping[str, str]


def find_environment(
    path: str,
    model_dir: Path,
    cache: Path | None,
    passed: Sequence[str] = ("*",),
    *,
    anywhere: bool = True,
    option: str = ENVIRONMENT,
) -> Environment:
    """The environment of a model. Blocks: an archive is unpacked at its first use.

    Args:
        path: a virtual or conda environment, or a conda-pack archive of one; `$$TRITON_MODEL_DIRECTORY` is the model's
            folder. Empty: the server's own interpreter.
        model_dir: the folder of the model; paths are relative to it.
        cache: where archives are unpacked; None: nowhere, so that one is an error.
        passed: the names of the server's variables that the model's processes get; see `passed_on`.
        anywhere: the environment may lie outside the model's folder, as the operator wrote the configuration.
        option: the option or parameter that names it, for errors.

    Raises:
        BackendError: the environment does not exist, has no interpreter, or must not lie there.
    """
    variables = passed_on(os.environ, passed)
    if not path:
        return Environment(SERVERS_OWN, variables)
    place = model_dir / path.replace(MODEL_DIRECTORY, str(model_dir)) if anywhere else _in_model(path, model_dir)
    if place.is_file():
        if cache is None:
            raise BackendError(
                f"{option}: '{place}' cannot be unpacked: the server's user has no home folder; name another one by "
                f"--backend-config=python,{CACHE_DIRECTORY}=..."
            )
        place = unpack(place, cache, variables)
    if not place.is_dir():
        raise BackendError(f"{option}: there is no environment '{place}'")
    for name in ("python", "python3"):  # Debian's Python has only the latter
        python = place / "bin" / name
        if os.access(python, os.X_OK):
            return Environment(str(python), activated(place, variables))
    raise BackendError(f"{option}: '{place}' is not an environment: it has no bin/python that can be run")


def _in_model(path: str, model_dir: Path) -> Path:
    try:
        return inside(model_dir, path.removeprefix(MODEL_DIRECTORY + "/"), model_dir)
    except OutsideError as error:
        raise BackendError(f"{ENVIRONMENT} of a configuration that a client brings: {error}") from None


def passed_on(variables: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables of these names, without the server's own; "NAME*" means all names with that prefix."""
    whole = {name for name in names if not name.endswith("*")}
    beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
    return {
        name: value
        for name, value in variables.items()
        if (name in whole or name.startswith(beginnings)) and not name.startswith(SECRETS)
    }


def activated(place: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables after the environment's own activation scripts: `bin/activate`, or conda's in `activate.d`.

    Blocks: a shell executes them.

    Raises:
        BackendError: a script fails, or does not end.
    """
    before = located(place, variables)
    scripts = [place / "bin" / "activate"]
    if not scripts[0].is_file():
        scripts = sorted((place / "etc" / "conda" / "activate.d").glob("*.sh"))
    shell = shutil.which("bash") or shutil.which("sh")
    if not scripts or shell is None:
        return before
    after = _sourced(shell, scripts, before)
    # A script may contain paths of the machine on which the environment was made.
    return located(place, {**after, "PATH": after.get("PATH", before["PATH"])})


def located(place: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with those by which programs find the environment."""
    out = {name: value for name, value in variables.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    out["PATH"] = _prepend(place / "bin", out.get("PATH", ""))
    if (place / "pyvenv.cfg").exists():
        out["VIRTUAL_ENV"] = str(place)
    else:
        out["CONDA_PREFIX"] = str(place)
        out["LD_LIBRARY_PATH"] = _prepend(place / "lib", out.get("LD_LIBRARY_PATH", ""))
    return out


def _sourced(shell: str, scripts: Sequence[Path], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables after a shell has sourced the scripts.

    A script's status is ignored: it is that of its last line, which may be a test.
    """
    command = [shell, "-c", _SOURCE, shell, *map(str, scripts)]
    try:
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=ACTIVATION_SECONDS,
            env=variables,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        raise BackendError(
            f"{ENVIRONMENT}: the script {scripts[0]} ended its shell with status {error.returncode}: "
            f"{_told(error.stderr)}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"{ENVIRONMENT}: the script {scripts[0]} did not end within {ACTIVATION_SECONDS} s"
        ) from error
    if not done.stdout:
        raise BackendError(f"{ENVIRONMENT}: one of the activation scripts in {scripts[0].parent} ends its shell (exit)")
    if done.stderr:
        log.warning("%s: the script %s says: %s", ENVIRONMENT, scripts[0], _told(done.stderr))
    found = (os.fsdecode(line).partition("=") for line in done.stdout.split(b"\0") if line)
    return {name: value for name, _, value in found if name not in _SHELLS_OWN or name in variables}


def _told(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()[-1000:]


def _prepend(folder: Path, paths: str) -> str:
    if paths == str(folder) or paths.startswith(f"{folder}{os.pathsep}"):
        return paths
    return f"{folder}{os.pathsep}{paths}" if paths else str(folder)


def unpack(archive: Path, cache: Path, variables: Mapping[str, str] | None = None) -> Path:
    """The folder with the content of an archive, which is unpacked again only if its path, time or size has changed.

    Several servers may share the cache: the first one unpacks, and the others wait.

    Args:
        archive: a packed environment.
        cache: the folder to unpack it in.
        variables: for conda-unpack; None: all of the server's variables that are passed on.

    Raises:
        BackendError: the file is not an archive, or cannot be unpacked.
    """
    stat = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()}\n{stat.st_mtime_ns}\n{stat.st_size}".encode()).hexdigest()[:20]
    place = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A process that can open the file can hold the lock and block every load: so only this user can open it.
        with open(os.open(cache / f"{key}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as lock:  # noqa: PTH123
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / COMPLETE).exists():
                log.info("unpacking the environment '%s' to '%s'", archive, place)
                shutil.rmtree(place, ignore_errors=True)  # of a server that was killed meanwhile
                try:
                    _unpack_to(archive, place, passed_on(os.environ, ("*",)) if variables is None else variables)
                    (place / COMPLETE).touch()
                except BaseException:
                    shutil.rmtree(place, ignore_errors=True)
                    raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, subprocess.SubprocessError) as error:
        raise BackendError(f"{ENVIRONMENT}: '{archive}' cannot be unpacked to '{place}': {error}") from error
    return place


def _unpack_to(archive: Path, place: Path, variables: Mapping[str, str]) -> None:
    place.mkdir(mode=0o700)
    with tarfile.open(archive) as content:
        if hasattr(tarfile, "tar_filter"):  # not in the first releases of Python 3.11
            content.extractall(place, filter="tar")
        else:
            content.extractall(place)
    fixer = place / "bin" / "conda-unpack"
    if fixer.exists():  # replaces the paths of the machine on which it was packed
        try:
            subprocess.run(
                [place / "bin" / "python", fixer],
                check=True,
                capture_output=True,
                env=located(place, variables),
            )
        except subprocess.CalledProcessError as error:
            text = _told(error.stderr)
            raise BackendError(f"{ENVIRONMENT}: conda-unpack of '{archive}' failed: {text}") from error
