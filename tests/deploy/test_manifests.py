"""The files of deploy/: Kubernetes manifests against its schemas, the systemd unit, options that exist."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from server.foreign import FOREIGN
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir())
OPTIONS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)} | {"model-store", "config"}


def rendered(overlay: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    folder = DEPLOY / "kubernetes" / "overlays" / overlay
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    if "unknown command" in done.stderr:
        pytest.skip("this kubectl has no kustomize")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_fit_the_schemas_of_kubernetes(overlay, tmp_path) -> None:
    manifest = tmp_path / f"{overlay}.yaml"
    manifest.write_text(rendered(overlay))
    command = [Path(sys.executable).parent / "kubernetes-validate", "--strict", manifest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_privileges_and_time_to_stop(overlay) -> None:
    for document in yaml.safe_load_all(rendered(overlay)):
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["terminationGracePeriodSeconds"] >= 45
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]


def arguments_in(value: object) -> list[str]:
    """All strings below `value` that look like an option."""
    if isinstance(value, str):
        return [value] if value.startswith("--") else []
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [argument for item in each for argument in arguments_in(item)]


@pytest.mark.parametrize(
    "path", [*sorted(DEPLOY.glob("k*/**/*.yaml")), DEPLOY / "compose" / "compose.yaml"], ids=lambda path: path.name
)
def test_options_in_manifests_exist(path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        for argument in arguments_in(document):
            name = argument[2:].partition("=")[0]
            assert name in OPTIONS or name in FOREIGN or name == "url", f"there is no option {argument}"


def test_kserve_finds_the_one_port_and_no_metrics_port() -> None:
    """KServe takes the first container port for the service, and any further one for REST."""
    runtime = yaml.safe_load((DEPLOY / "kserve" / "runtime.yaml").read_text())
    container = runtime["spec"]["containers"][0]
    assert container["name"] == "kserve-container"
    assert [port["name"] for port in container["ports"]] == ["h2c"]
    assert runtime["spec"]["protocolVersions"] == ["grpc-v2"]
    for service in yaml.safe_load_all((DEPLOY / "kserve" / "services.yaml").read_text()):
        assert service["spec"]["predictor"]["model"]["protocolVersion"] == "grpc-v2"
        assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]


def test_keda_scales_what_there_is_by_what_is_measured() -> None:
    scaled = yaml.safe_load((DEPLOY / "keda" / "scaledobject.yaml").read_text())["spec"]
    deployment = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "deployment.yaml").read_text())
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    [trigger] = scaled["triggers"]
    [metric] = re.findall(r"nv_\w+", trigger["metadata"]["query"])
    assert f"| `{metric}` | gauge |" in (ROOT / "docs" / "observability.md").read_text()
    assert float(trigger["metadata"]["threshold"]) > 0


def test_the_unit_is_right_for_systemd(tmp_path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "inferd.service").read_text()
    unit = tmp_path / "inferd.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert said == []


def test_compose_drops_what_the_manifests_drop() -> None:
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["inferd"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"], json.dumps(service)
