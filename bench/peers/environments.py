"""Servers in Python that are measured beside this one, each in an environment of its own with pinned packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.peers.base import CACHE, AbsentError

PACKAGES = {
    "mlserver": ("mlserver==1.7.1",),
    "kserve": ("kserve==0.21.0",),
    "ray": ("ray[serve-grpc]==2.60.0", "numpy"),
    "mosec": ("mosec==0.9.8", "numpy"),
    "litserve": ("litserve==0.2.19", "numpy"),
    "bentoml": ("bentoml==1.4.38", "numpy"),
}


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment.

    Raises:
        AbsentError: it has not been installed.
    """
    python = CACHE / f"env-{name}" / "bin" / "python"
    if not python.exists():
        raise AbsentError(f"{name}: python -m bench.peers --install")
    return python


def version_of(name: str) -> str:
    """The server and its version."""
    package = PACKAGES[name][0].partition("[")[0].partition("==")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python_of(name), "-c", code], capture_output=True, text=True, check=True)
    return f"{package} {done.stdout.strip()}"


def install() -> list[str]:
    """Make the environments that are not there; returns what could not be installed."""
    failed = []
    for name, packages in PACKAGES.items():
        folder = CACHE / f"env-{name}"
        print(f"{name}: {' '.join(packages)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        command = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "install",
            *packages,
        ]
        if subprocess.run(command).returncode != 0:
            failed.append(name)
            (folder / "bin" / "python").unlink()
    return failed
