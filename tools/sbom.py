"""Lists what an image contains, for its Dockerfile: the packages of its environment, and those of its distribution.

    tools/sbom.py OUT ENVIRONMENT STATUS

OUT is a file of CycloneDX's JSON, ENVIRONMENT the interpreter of a virtual environment, and STATUS the folder of the
image with dpkg's `status`. cyclonedx-py must be in the PATH.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

FORMAT = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"


def main(out: str, environment: str, status: str) -> None:
    subprocess.run(["cyclonedx-py", "environment", "--of", "JSON", "-o", out, environment], check=True)
    found = json.loads(Path(out).read_text())
    release = platform.freedesktop_os_release()
    query = ["dpkg-query", f"--admindir={status}", "--show", f"--showformat={FORMAT}"]
    for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines():
        state, name, version, architecture = line.split("\t")
        if state != "installed":
            continue
        distribution = f"{release['ID']}-{release['VERSION_ID']}"
        address = f"pkg:deb/{release['ID']}/{name}@{quote(version, safe='')}?arch={architecture}&distro={distribution}"
        package = {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}
        found["components"].append(package)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
