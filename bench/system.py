"""The machine and the software on which figures were measured."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import subprocess
import sys
from pathlib import Path

import psutil

from inferd_client.driver import NGHTTP2

PACKAGES = ("grpcio", "protobuf", "uvloop", "numpy", "torch", "onnxruntime", "Cython")


def describe() -> dict[str, str]:
    """Processor, cores, memory, kernel."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": str(psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "network": "loopback, driver and servers on the same cores",
    }


def versions() -> dict[str, str]:
    """Python, the libraries and the driver."""
    found = {"python": sys.version.split()[0], "driver": f"inferd_client.driver on nghttp2 {NGHTTP2}"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def source_version() -> str:
    """The commit of this source tree, "+" when it has changes."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def raise_file_limit() -> None:
    """Raise the limit of open files for this process and its servers as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
