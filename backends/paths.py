"""Resolves the names of files in configurations: one rule for all of them.

A name is relative and has no `..`. Its target, links followed, lies in the model's folder, or in the folder that it is
relative to: an operator may replace a version's folder by a link. The rule does not hold for a file with its backend's
usual name, which the configuration does not name: it may be a link to anywhere, since only the operator can have put it
there.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


class OutsideError(ValueError):
    """The name leads out of the model's folder. The text tells neither the target nor whether it exists."""


def inside(base: Path, name: str, model_dir: Path) -> Path:
    """`base`/`name`, which need not exist.

    Args:
        base: the folder that the name is relative to: the model's, a version's, or another in the model's.
        name: as the configuration has it.
        model_dir: the model's folder.

    Raises:
        OutsideError: it leads out of both.
    """
    path = base / name
    is_plain = "/" not in name and "\0" not in name and name not in {"", ".", ".."}
    if is_plain and not os.path.islink(path):  # noqa: PTH114 (a path that cannot be looked at gets another error later)
        return path  # in the folder itself: a quick check, because there may be thousands of models
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise OutsideError(f"'{name}' must stay within the model directory: write a name relative to {base}")
    real = os.path.realpath(path)
    if real == str(path):
        return path  # there are no links
    found = Path(real)
    if not any(found.is_relative_to(folder.resolve()) for folder in (model_dir, base)):
        raise OutsideError(f"'{name}' must stay within the model directory, but it is a link to another place")
    return path
