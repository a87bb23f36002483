"""Independent load drivers, to check ours by: h2load of nghttp2 and Triton's perf_analyzer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import CACHE, AbsentError
from bench.peers.download import debian_library, unpacked_wheel
from inferd_client.driver import INFER_PATH
from inferd_client.driver.report import frame

PERF_ANALYZER_WHEEL = "tritonclient==2.41.0"


@dataclass(frozen=True, slots=True)
class Driven:
    """The figures that another driver reports."""

    requests: int
    seconds: float
    rate: float


def h2load(
    address: str,
    request: bytes,
    *,
    requests: int,
    connections: int,
    in_flight: int,
    folder: Path,
    encrypted: bool = False,
) -> Driven:
    """Run h2load; it looks at HTTP statuses only.

    Raises:
        AbsentError: it is not installed.
        RuntimeError: some of its requests failed.
    """
    body = folder / "h2load.body"
    body.write_bytes(frame(request))
    arguments = [f"-n{requests}", f"-c{connections}", f"-m{in_flight}", "-H", "content-type: application/grpc"]
    scheme = "https" if encrypted else "http"
    arguments += ["-H", "te: trailers", "-d", str(body), f"{scheme}://{address}{INFER_PATH}"]
    text = run_h2load(*arguments)
    finished = re.search(r"finished in ([\d.]+)(us|ms|s), ([\d.]+) req/s", text)
    succeeded = re.search(r"(\d+) succeeded", text)
    if finished is None or succeeded is None or int(succeeded[1]) != requests:
        raise RuntimeError(f"h2load failed:\n{text}")
    unit = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[finished[2]]
    return Driven(requests, float(finished[1]) * unit, float(finished[3]))


def run_h2load(*arguments: str) -> str:
    """Run h2load; what it prints.

    Raises:
        AbsentError: it is not installed.
        subprocess.CalledProcessError: it failed.
    """
    binary = shutil.which("h2load")
    if binary is None:
        raise AbsentError("h2load: apt-get install nghttp2-client")
    return subprocess.run([binary, *arguments], check=True, capture_output=True, text=True).stdout


def perf_analyzer(address: str, model: str, *, concurrency: int, shape: str, milliseconds: int = 2500) -> float:
    """Run perf_analyzer with asynchronous calls; requests per second.

    Args:
        shape: of a variable input, e.g. "INPUT0:16".

    Raises:
        AbsentError: it cannot be downloaded.
        RuntimeError: it gives no result; with its output.
    """
    data = unpacked_wheel(PERF_ANALYZER_WHEEL) / "tritonclient-2.41.0.data" / "data"
    binary = next(data.rglob("perf_analyzer"))
    binary.chmod(0o755)
    libraries = [debian_library("libb64-0d", "libb64.so.0d"), cuda_runtime()]
    command = [str(binary), "-i", "grpc", "-u", address, "-m", model, "-a", "--shape", shape]
    command += ["--concurrency-range", str(concurrency), "-p", str(milliseconds), "--max-trials", "3", "-s", "50"]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    rate = re.search(r"Throughput: ([\d.]+) infer/sec", done.stdout)
    if rate is None:
        raise RuntimeError(f"perf_analyzer failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(rate[1])


def cuda_runtime() -> Path:
    """A folder with libcudart.so.12, which perf_analyzer is linked to and does not use here: Triton's wheel has one."""
    folder = CACHE / "cudart"
    link = folder / "libcudart.so.12"
    if not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        library = next((unpacked_wheel("nvidia-pytriton==0.7.0") / "nvidia_pytriton.libs").glob("libcudart-*"))
        link.symlink_to(library)
    return folder
