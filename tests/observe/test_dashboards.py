"""What is shipped for Prometheus and Grafana asks only for metrics that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inferd.server.observe.metrics import gpu
from inferd.server.observe.metrics.text import Family
from tests.observe.scraping import scrape, scraped_server
from tests.observe.test_metrics import DECOUPLED, IDENTITY, tensor, triton, write

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "deploy/prometheus").glob("*.yml"))
CONFIGURATIONS = {"prometheus.yml", "kubernetes.yml"}
DASHBOARD = ROOT / "deploy/grafana/inferd.json"

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
FUNCTIONS = {"sum", "by", "rate", "increase", "avg", "max", "histogram_quantile", "and", "or", "label_values"}
OF_PROMETHEUS = {"up"}
OF_GPUS = {family.name for family in vars(gpu).values() if isinstance(family, Family)}


def metrics_of(expression: str) -> set[str]:
    """The names of metrics in an expression."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\bby\s*\([^)]*\)", "", bare)
    return {name for name in NAME.findall(bare) if name not in FUNCTIONS and not name.startswith("$")}


def dashboard_expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    return [*asked, *(re.sub(r", \w+\)", ")", text) for text in variables)]


def rule_expressions(text: str) -> list[str]:
    lines = re.sub(r"expr: >-\n((?: {10,}.*\n)+)", lambda found: "expr: " + " ".join(found[1].split()) + "\n", text)
    return re.findall(r"^ +expr: (.*)$", lines, re.MULTILINE)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """The names of all samples of a server that has had some traffic, and of what the rules record."""
    worked = IDENTITY.replace('"identity"', '"python"')
    root = write(tmp_path_factory.mktemp("models"), plain=IDENTITY, stream=DECOUPLED, worked=worked)
    (root / "worked" / "1" / "model.py").write_text("class TritonPythonModel:\n    pass\n")
    with scraped_server(root) as (process, metrics), triton.InferenceServerClient(process.address) as client:
        client.infer("plain", [tensor()])
        with pytest.raises(triton.InferenceServerException):
            client.infer("nobody", [tensor()])
        names = {name for name, _ in scrape(metrics).samples}
    recorded = {name for path in RULES for name in re.findall(r"record: (\S+)", path.read_text())}
    return names | recorded | OF_PROMETHEUS | OF_GPUS


def test_every_panel_asks_for_metrics_that_are_there(emitted):
    expressions = dashboard_expressions()
    assert len(expressions) > 20
    for expression in expressions:
        assert metrics_of(expression), expression
        assert metrics_of(expression) <= emitted, expression


def test_every_panel_can_be_narrowed_to_a_server():
    """By the variables instance and pod, of which outside of Kubernetes there is no label."""
    variables = {each["name"]: each for each in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    assert variables["pod"]["allValue"] == variables["instance"]["allValue"] == ".*"
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors and all('instance=~"$instance",pod=~"$pod"' in each for each in selectors), target["expr"]


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_every_rule_asks_for_metrics_that_are_there(emitted, path):
    for expression in rule_expressions(path.read_text()):
        assert metrics_of(expression) <= emitted, expression
    assert path.name in CONFIGURATIONS or rule_expressions(path.read_text())


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_prometheus_takes_the_rules(path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    what = "config" if path.name in CONFIGURATIONS else "rules"
    checked = subprocess.run([promtool, "check", what, str(path)], capture_output=True, text=True, check=False)
    if "kubernetes_sd_configs not found" in checked.stdout + checked.stderr:
        pytest.skip("this promtool knows no Kubernetes, as Debian's")
    assert checked.returncode == 0, checked.stdout + checked.stderr
