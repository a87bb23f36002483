"""A wheel of the client alone, `inferd-client`: without the server, its backends and their dependencies.

    python tools/client_wheel.py [DIRECTORY]        DIRECTORY: dist/ unless given

It needs what `make build` needs, and links libnghttp2 of this system, as `make wheel` does before auditwheel. Sources
that `make build` has translated to C are not translated again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "client"
TRANSLATED = ROOT / "build" / "cython-release" / "inferd_client"
METADATA = """\
[build-system]
requires = {requires}
build-backend = "setuptools.build_meta"

[project]
name = "inferd-client"
version = "{version}"
description = "A client for the KServe v2 protocol with Triton's extensions: tritonclient's API on native HTTP/2"
requires-python = "{python}"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = ["numpy>=2.0", "protobuf>=6.33.5,<8"]

[project.optional-dependencies]
bf16 = ["ml_dtypes>=0.5"]
cuda = ["cuda-bindings>=13.1"]

[tool.setuptools.packages.find]
include = ["inferd_client", "inferd_client.*"]

[tool.setuptools.package-data]
"*" = ["*.pxd", "*.pyi", "py.typed"]
"""


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute()
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shutil.rmtree(WORK, ignore_errors=True)
    unwanted = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    shutil.copytree(ROOT / "inferd_client", WORK / "inferd_client", ignore=unwanted)
    if TRANSLATED.is_dir():
        kind = os.environ.get("INFERD_BUILD", "release")
        # the copies keep their times, so that C older than its source is translated again
        shutil.copytree(TRANSLATED, WORK / "build" / f"cython-{kind}" / "inferd_client")
    for name in ("setup.py", "LICENSE"):
        shutil.copyfile(ROOT / name, WORK / name)
    project = whole["project"]
    (WORK / "pyproject.toml").write_text(
        METADATA.format(
            requires=whole["build-system"]["requires"], version=project["version"], python=project["requires-python"]
        )
    )
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    subprocess.run([*command, str(WORK)], check=True)


if __name__ == "__main__":
    main()
