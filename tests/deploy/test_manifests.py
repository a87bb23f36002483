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

from inferd.server.addresses import parse_bind
from inferd.server.foreign import FOREIGN
from inferd.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
OF_OTHERS = {"PodMonitor"}
"""Kinds that Kubernetes itself does not have."""
OPTIONS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)} | {"model-store", "config"}


def rendered(overlay: str) -> str:
    return kustomized(KUBERNETES / "overlays" / overlay)


def kustomized(folder: Path) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    if "unknown command" in done.stderr:
        pytest.skip("this kubectl has no kustomize")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def composed(tmp_path):
    """An overlay in a copy of the folder, with all components: its objects by their kinds."""
    copy = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")

    def compose(overlay: str) -> dict[str, dict]:
        (copy / "own").mkdir(exist_ok=True)
        components = "".join(f"  - ../components/{name}\n" for name in COMPONENTS)
        text = f"namespace: serving\nresources:\n  - ../overlays/{overlay}\ncomponents:\n{components}"
        (copy / "own" / "kustomization.yaml").write_text(text)
        return {each["kind"]: each for each in yaml.safe_load_all(kustomized(copy / "own"))}

    compose.copy = copy
    return compose


@pytest.mark.parametrize("overlay", [*OVERLAYS, "cpu with all components", "gpu with all components"])
def test_manifests_fit_the_schemas_of_kubernetes(overlay, composed, tmp_path) -> None:
    manifest = tmp_path / "manifest.yaml"
    name, _, more = overlay.partition(" ")
    known = [each for kind, each in composed(name).items() if kind not in OF_OTHERS] if more else ()
    manifest.write_text(yaml.safe_dump_all(known) if more else rendered(name))
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


def test_probes_ask_an_address_without_tls_that_answers_nothing_else(composed) -> None:
    """The kubelet speaks no TLS."""
    [container] = composed("cpu")["Deployment"]["spec"]["template"]["spec"]["containers"]
    binds = {bind.address.port: bind for bind in (parse_bind(text, 0) for text in addresses_of(container))}
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    ports = {next(probe[kind]["port"] for kind in ("grpc", "tcpSocket") if kind in probe) for probe in probes}
    [port] = ports
    assert (binds[port].rules.tls, binds[port].rules.groups) == (False, ("health",))
    assert binds[8001].rules.tls


def addresses_of(container) -> list[str]:
    option = "--grpc-address="
    return [each.removeprefix(option) for each in container["args"] if each.startswith(option)]


def test_prometheus_and_the_collector_may_be_in_other_namespaces(composed) -> None:
    """The names of their namespaces are in one file; stores are reached where the component is chosen."""
    (composed.copy / "base" / "namespaces.env").write_text("metrics=watching\ntraces=tracing\n")
    made = composed("cpu")
    assert "ConfigMap" not in made
    policy = made["NetworkPolicy"]["spec"]
    namespaces = [namespaces_of(rule["from"]) for rule in policy["ingress"]]
    assert namespaces == [[{"inferd-clients": "true"}], [{"kubernetes.io/metadata.name": "watching"}]]
    [tracing] = [rule for rule in policy["egress"] if "namespaceSelector" in rule.get("to", [{}])[0]]
    assert namespaces_of(tracing["to"]) == [{"kubernetes.io/metadata.name": "tracing"}]
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in policy["egress"]


def namespaces_of(peers) -> list[dict[str, str]]:
    return [each["namespaceSelector"]["matchLabels"] for each in peers if "namespaceSelector" in each]


def test_scraped_pods_are_of_the_job_that_alerts_name(composed) -> None:
    made = composed("cpu")
    [job] = re.findall(r'job="(\w+)"', (DEPLOY / "prometheus" / "alerts.yml").read_text())
    pod = made["Deployment"]["spec"]["template"]
    monitor = made["PodMonitor"]["spec"]
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == job
    ports = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    [scraped] = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"]
    assert scraped["job_name"] == job


def arguments_in(value: object) -> list[str]:
    """All strings below `value` that look like an option."""
    if isinstance(value, str):
        return re.findall(r"--[a-z][^\s\"]*", value)
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
