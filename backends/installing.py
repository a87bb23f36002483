"""The command that installs a missing package, for errors."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def pip_install(what: str, *options: str) -> str:
    """The command that installs `what`, a package with or without extras, for this interpreter.

    An image of inferd has no pip and cannot be written to: there it is the argument with which the image is built.
    """
    if (Path(sys.prefix) / "sbom.cdx.json").is_file():
        return f"build the image with {shlex.join(['--build-arg', f'PACKAGES={what}'])}"
    return shlex.join([sys.executable, "-m", "pip", "install", *options, what])
