"""What the pages for users name is there: linked files and headings, paths, verbs of make, programs, options."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.works import works
from inferd.server.commands.connecting import Server
from inferd.server.foreign import FOREIGN
from inferd.server.program import COMMANDS
from inferd.server.settings import Settings
from inferd.server.tools.perf import spelling
from inferd_client.pb import model_config_pb2

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "bench/*.md", "bench/results/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
FOLDERS = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
VERB = re.compile(r"\bmake ([a-z]+)\b(?!:)")
PROGRAM = re.compile(r"python -m ((?:bench|tests|server|examples)[\w.]*)")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]*[a-z0-9])(?![\w-])")

OTHERS_OPTIONS = {
    *("index-url", "protocol", "http2-prior-knowledge", "list-methods", "data-binary"),  # pip, buf, curl
    *("cpp_out", "grpc_out", "cflags", "libs"),  # protoc, pkg-config
    *("build-arg", "read-only", "tmpfs", "isolation"),  # docker, buildah
    "enable-feature",  # prometheus
    *("target", "quick", "only", "server", "help", "seconds", "rounds", "gather", "door", "policy", "queue"),  # ours
    *("draw", "again", "measure", "jobs", "alone", "join"),  # of tests.mutants
    *("install", "page", "rounds"),  # of bench.peers
    *("check", "record"),  # of bench.instructions
    *(
        "architectures",
        "variant",
        "include",
        "sysroot",
        "no-build-isolation",
        "no-deps",
        "platform",
    ),  # of a cross build
    "rate",
}
"""Options in the pages that are not the server's."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names by which headings are linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert not heading or heading in anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_whole(page: Path) -> None:
    """A row that an empty line cuts off from its table is shown as text."""
    for first, second in re.findall(r"(?<=\n)\n(\|[^\n]*)\n([^\n]*)", page.read_text()):
        assert second.startswith("|") and set(second) <= set("|-: "), f"a table without head: {first}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_are_there(page: Path) -> None:
    for text in CODE.findall(page.read_text()):
        if text.startswith(FOLDERS) and re.fullmatch(r"[\w./*-]+", text) and not text.startswith(("build/", "demo/")):
            assert any(ROOT.glob(text.rstrip("/"))), f"there is no {text}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_verbs_of_make_and_programs_are_there(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    commands = " ".join(CODE.findall(text)) + "\n".join(re.findall(r"^    .*", text, re.MULTILINE))
    assert set(VERB.findall(commands)) <= verbs
    for program in PROGRAM.findall(text):
        assert importlib.util.find_spec(program) is not None, f"there is no {program}"


def function_of(chain: tuple[str, ...]) -> Callable[..., object]:
    module, _, function = COMMANDS[chain].place.partition(":")
    return getattr(importlib.import_module(module), function)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT / "bench" / "results"], ids=name)
def test_options_are_there(page: Path) -> None:
    ours = {field.name for field in dataclasses.fields(Settings)} | {"config", "version", "model-store"}
    for command in (Server, *map(function_of, COMMANDS)):
        ours |= set(inspect.signature(command).parameters)
    theirs = {*spelling.SAME, *spelling.FLAGS, *spelling.ONLY, *spelling.VALUED}
    known = {option.replace("_", "-") for option in ours} | FOREIGN.keys() | OTHERS_OPTIONS
    known |= {option.removeprefix("--") for option in theirs}
    for option in OPTION.findall(page.read_text()):
        assert option in known, f"there is no option --{option}"


@pytest.mark.parametrize("backend", ["onnxruntime", "pytorch", "tensorrt"])
def test_parameters_of_backends_are_explained(backend: str) -> None:
    known = importlib.import_module(f"backends.{backend}.options").KNOWN
    text = (ROOT / "docs" / "backends.md").read_text()
    assert {key for key in known if f"`{key}`" not in text} == set()


def test_fields_of_models_are_explained() -> None:
    fields = model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert {field for field in fields if not re.search(rf"`{field}\b", text)} == set()


def test_programs_and_parts_of_the_benchmarks_are_listed() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    paths = [path for folder in ("bench", "tests/storms") for path in (ROOT / folder).glob("*.py")]
    programs = [path.relative_to(ROOT).with_suffix("") for path in paths if "def main(" in path.read_text()]
    names = {".".join(program.parts) for program in programs}
    assert {name for name in names if f"-m {name} " not in text} == set()
    parts = {work.name for work in works()} | {"drivers", "idle", "window", "python_memory", "digits"}
    assert {part for part in parts if f"`{part}`" not in text} == set()


ROW = re.compile(r"^\| `([\w./]+)` \| ((?:`[\w.]+`(?:, )?)+) \|", re.MULTILINE)


def test_the_way_of_a_request_names_what_is_there() -> None:
    """Each function in docs/architecture.md stands in the file that it is named with; each type exists.

    The README has the same functions in the same order.
    """
    page = (ROOT / "docs/architecture.md").read_text()
    rows = ROW.findall(page)
    assert len(rows) > 15
    for path, names in rows:
        source = (ROOT / path).read_text()
        for function in CODE.findall(names):
            assert re.search(rf"\b{function.split('.')[-1]}\(", source), f"{path} has no {function}"
    readme = (ROOT / "README.md").read_text()
    way = re.search(r"A native ModelInfer passes these functions:(.*?)\n\n", readme, re.DOTALL)
    assert way is not None
    assert CODE.findall(way[1]) == [function for _, names in rows for function in CODE.findall(names)]
    native = "\n".join(
        file.read_text() for root in ("_native", "backends") for file in (ROOT / root).rglob("*.p[xy][dx]")
    )
    python = "\n".join(
        file.read_text() for root in ("server", "backends", "tests") for file in (ROOT / root).rglob("*.py")
    )
    for code in CODE.findall(page):
        if re.fullmatch(r"[A-Z]\w+|[a-z]+(_[a-z]+)+", code) and code != "_native":
            assert re.search(rf"\b{code}\b", native + python), f"nothing is named {code}"


def test_each_rule_against_hostile_clients_names_its_test() -> None:
    """Every line of the tables says which test attacks."""
    section = (ROOT / "docs/operations.md").read_text().split("## Hostile clients")[1].split("\n## ")[0]
    rows = [
        line for line in section.splitlines() if line.startswith("| ") and not line.startswith(("| attack", "| place"))
    ]
    assert len(rows) >= 20
    for row in rows:
        path, _, test = row.rsplit("|", 2)[1].strip(" `").partition("::")
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), row
