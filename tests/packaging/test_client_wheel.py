"""The wheel of the client alone: it is built, and works where nothing else of this project is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
import inferd_client.grpc as grpcclient
assert inferd_client.__file__.startswith(sys.argv[1]), inferd_client.__file__
try:
    grpcclient.InferenceServerClient("127.0.0.1:1").is_server_live()
except grpcclient.InferenceServerException as error:
    print(error.status(), len(grpcclient.service_pb2.ServerLiveRequest().SerializeToString()))
print(sorted({"inferd", "grpc"} & set(sys.modules)))
"""


def test_the_client_alone(tmp_path):
    """Guards what the wheel has, and that it needs neither the server nor grpcio."""
    build = [sys.executable, str(ROOT / "tools" / "client_wheel.py"), str(tmp_path)]
    environment = {**os.environ, "INFERD_BUILD": "quick"}
    done = subprocess.run(build, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("inferd_client-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "there")
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"inferd_client"}
    assert not any(name.endswith((".c", ".pyx")) for name in names)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    command = [sys.executable, "-c", USE.replace("import sys\n", "import sys, inferd_client\n", 1)]
    done = subprocess.run(
        [*command, str(tmp_path / "there")], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.stdout.splitlines() == ["StatusCode.UNAVAILABLE 0", "[]"], done.stderr
