"""The command that installs a missing package, for errors."""

from __future__ import annotations

import shlex
import sys


def pip_install(what: str, *options: str) -> str:
    """The command that installs `what`, a package with or without extras, for this interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "install", *options, what])
