"""Prints the requirements of an extra of this package, those of its other extras included, one a line.

    python tools/requirements.py dev

The server itself is not among them: `make` installs it from the tree.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

OWN = re.compile(r"inferd\[([a-z0-9,-]+)\]")


def requirements(project: dict[str, object], extra: str) -> Iterator[str]:
    """The requirements of the package without extras, then those of one extra."""
    extras = project["optional-dependencies"]
    for each in extras[extra]:  # type: ignore[index]
        if own := OWN.fullmatch(each):
            for name in own[1].split(","):
                yield from requirements(project, name)
        else:
            yield each


def main() -> None:
    project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())["project"]
    print(*project["dependencies"], *dict.fromkeys(requirements(project, sys.argv[1])), sep="\n")


if __name__ == "__main__":
    main()
