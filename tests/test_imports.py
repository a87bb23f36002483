"""Who may import whom: the contract of the design, enforced over .py, .pyi, .pyx and .pxd, `cimport` included."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = ("_native", "backends", "server")  # in the package `inferd`; rules and layers name them without it
OURS = (*INSTALLED, "inferd", "inferd_client", "bench", "examples", "tests", "tools")
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd"}
FRAMEWORKS = ("torch", "onnxruntime", "onnx", "tensorflow", "tensorrt", "openvino", "sklearn", "rich")


@dataclass(frozen=True)
class Rule:
    """What modules under `package` may import of ours, and what they may not import of others."""

    package: str
    may: tuple[str, ...] = ()  # beside themselves
    may_not: tuple[str, ...] = ()


TRANSPORT = ("grpc", "socket", "ssl")
CORE = ("backends.installing", "server.addresses", "server.errors", "server.settings", "server.caching")

# The first rule whose package holds a module is the module's rule.
RULES = (
    Rule("_native", may_not=TRANSPORT),
    # For programs that use grpcio themselves; imported when they call it.
    Rule("inferd_client.grpc.service_pb2_grpc", may=("inferd_client",), may_not=FRAMEWORKS),
    # It is installed without the server.
    Rule("inferd_client", may_not=("grpc", *(name for name in FRAMEWORKS if name != "torch"))),
    Rule("backends.paths", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("backends.temporary", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("backends.installing", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("backends.onnx_files", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("backends.opening", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("backends.specs", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("backends.api", may=("_native", "backends.paths", "backends.specs"), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule(
        "backends.loader",
        may=("_native", "backends.api", "backends.installing", "backends.opening", "backends.parameters"),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule("backends.parameters", may=("backends.api",), may_not=(*TRANSPORT, *FRAMEWORKS)),
    # The worker side runs in any interpreter, without this package: it may import nothing of ours.
    Rule("backends.python.worker", may_not=("grpc", "ssl", *FRAMEWORKS)),
    # Run in workers, as programs for these.
    Rule("backends.python.programs", may_not=("grpc", "ssl")),
    Rule(
        "backends.python",
        may=("_native", "backends.api", "backends.installing", "backends.parameters", "backends.paths"),
        may_not=("grpc", "ssl"),
    ),
    Rule("backends.agreement", may=("backends.api",), may_not=(*TRANSPORT, *FRAMEWORKS)),
    # An accelerator of ONNX Runtime is OpenVINO, where the installed build lacks it.
    Rule(
        "backends.onnxruntime",
        may=(
            "_native",
            "backends.agreement",
            "backends.api",
            "backends.installing",
            "backends.onnx_files",
            "backends.opening",
            "backends.openvino",
            "backends.parameters",
        ),
        may_not=TRANSPORT,
    ),
    # Parts of these are programs for the workers of the Python backend.
    Rule(
        "backends.pytorch",
        may=(
            "_native",
            "backends.api",
            "backends.installing",
            "backends.opening",
            "backends.parameters",
            "backends.python",
            "backends.temporary",
        ),
        may_not=TRANSPORT,
    ),
    Rule(
        "backends.tensorflow",
        may=(
            "_native",
            "backends.agreement",
            "backends.api",
            "backends.parameters",
            "backends.paths",
            "backends.python",
        ),
        may_not=TRANSPORT,
    ),
    Rule(
        "backends.tensorrt",
        may=("_native", "backends.api", "backends.installing", "backends.onnx_files", "backends.parameters"),
        may_not=TRANSPORT,
    ),
    Rule("backends.triton_api", may=("backends.api", "backends.python"), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule(
        "backends.*",
        may=("_native", "backends.agreement", "backends.api", "backends.installing", "backends.parameters"),
        may_not=TRANSPORT,
    ),
    Rule("backends", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("server.errors", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("server.addresses", may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule(
        "server.settings",
        may=("server.addresses", "server.errors", "server.caching"),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule(
        "server.engine",
        may=(
            "_native",
            "backends.api",
            "backends.loader",
            "backends.paths",
            "backends.temporary",
            "inferd_client.pb",
            *CORE,
        ),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule(
        "server.observe",
        may=("_native", "backends.api", "server.engine", "server.machine", "inferd_client.pb", *CORE),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    # Requests go to the native service at once: an engine adds nothing to them.
    Rule(
        "server.rpc",
        may=(
            "backends.api",
            "server.engine",
            "_native.service.infer",
            "_native.service.ticket",
            "inferd_client.pb",
            *CORE,
        ),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    # Clients of a server: they need its protocol, not its engine.
    # Textual shows texts of rich, which it imports itself; the module is imported on demand.
    Rule("server.tools.screen", may=("server.tools",), may_not=TRANSPORT),
    Rule(
        "server.tools",
        may=("backends.installing", "inferd_client", "server.errors", "server.observe.escaping"),
        may_not=FRAMEWORKS,
    ),
    Rule(
        "server.front",
        may=("_native", "server.engine", "server.observe", "inferd_client.pb", "server.rpc", *CORE),
        may_not=FRAMEWORKS,
    ),
    # Commands need the engine without a front door.
    Rule(
        "server.composition.engine",
        may=("backends.api", "backends.loader", "server.engine", *CORE),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule(
        "server.composition",
        may=("_native", "server.engine", "server.front", "server.machine", "server.observe", "server.rpc", *CORE),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule("server.app", may=("_native", "server"), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("server.build", may=("_native.transport.libraries", "server"), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("server.beginning", may=(*CORE,), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule(
        "server.authoring",
        may=(
            "backends.api",
            "server.composition.engine",
            "server.engine",
            "server.importing",
            "inferd_client.pb",
            *CORE,
        ),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule("server.importing", may=("server.engine", "inferd_client.pb", *CORE), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule(
        "server.commands",
        may=(
            "backends.api",
            "backends.loader",
            "server.app",
            "server.authoring",
            "server.beginning",
            "server.checking",
            "server.contract",
            "server.engine",
            "server.program",
            "server.spelling",
            "server.tools",
            *CORE,
        ),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule(
        "server.checking",
        may=("backends.api", "backends.loader", "server.composition.engine", "server.engine", *CORE),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule(
        "server.contract",
        may=("_native", "backends.api", "server.composition.engine", "server.engine", "inferd_client.pb", *CORE),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    # Imports cyclopts, commands and options when they are used.
    Rule("server.program", may=("server.errors",), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("server.manual", may=("server.program", "server.settings"), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule("server.spelling", may=("server.foreign", *CORE), may_not=(*TRANSPORT, *FRAMEWORKS)),
    Rule(
        "server.cli",
        may=("server.build", "server.manual", "server.program", "server.spelling", "server.tools", *CORE),
        may_not=(*TRANSPORT, *FRAMEWORKS),
    ),
    Rule("server", may_not=(*TRANSPORT, *FRAMEWORKS)),
    # Tests use the load generator of the benchmarks, and not the other way round.
    Rule("bench", may=("_native", "backends", "examples", "inferd_client", "server")),
)


@dataclass(frozen=True)
class Import:
    """`module` is imported, or `name` from it; `module` is absolute."""

    line: int
    module: str
    name: str = ""

    def is_within(self, package: str) -> bool:
        return within(self.module, package) or (self.name != "" and within(f"{self.module}.{self.name}", package))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


CYTHON_IMPORT = re.compile(
    r"^\s*(?:from\s+(?P<module>[\w.]+)\s+c?import\s+(?P<names>\([^)]*\)|[^\n#]+)|c?import\s+(?P<modules>[\w., ]+))",
    re.MULTILINE,
)


def split_names(names: str) -> list[str]:
    """The names in `a, b as c` or `(a, b,)`."""
    return [part.split()[0] for part in names.strip("() \n").split(",") if part.strip()]


def cython_imports(text: str) -> Iterator[Import]:
    for found in CYTHON_IMPORT.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["modules"]:
            yield from (Import(line, module) for module in split_names(found["modules"]))
        else:
            yield from (Import(line, found["module"], name) for name in split_names(found["names"]))


def python_imports(text: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (Import(node.lineno, base, alias.name) for alias in node.names)


def absolute(found: Import, module: str, is_package: bool) -> Import:
    """`found` with a relative module (`..x`) resolved against the importing module, and without `inferd`."""
    dots = len(found.module) - len(found.module.lstrip("."))
    if not dots:
        return Import(found.line, found.module.removeprefix("inferd."), found.name)
    parts = module.split(".")
    base = parts[: len(parts) - dots + (1 if is_package else 0)]
    return Import(found.line, ".".join([*base, *filter(None, [found.module[dots:]])]), found.name)


def rule_of(module: str) -> Rule | None:
    for rule in RULES:
        if rule.package.endswith(".*"):
            if module.startswith(rule.package[:-1]):
                return rule
        elif within(module, rule.package):
            return rule
    return None


def own_package(module: str, rule: Rule) -> str:
    """What a module may always import: all under its rule, or its own backend under `backends.*`."""
    return ".".join(module.split(".")[:2]) if rule.package.endswith(".*") else rule.package


def violations(path: Path, module: str) -> Iterator[str]:
    """One sentence for each import of the file that its rule forbids."""
    rule = rule_of(module)
    if rule is None:
        return
    text = path.read_text()
    imports = cython_imports(text) if path.suffix in {".pyx", ".pxd"} else python_imports(text)
    allowed = (*rule.may, own_package(module, rule))
    for relative in imports:
        found = absolute(relative, module, is_package=path.stem == "__init__")
        if relative.module.split(".")[0] in INSTALLED:
            yield f"{path}:{relative.line}: {relative.module} is inferd.{relative.module}"
        what = f"{found.module}{'.' if found.name else ''}{found.name}"
        if any(found.is_within(package) for package in rule.may_not):
            yield f"{path}:{found.line}: {module} may not import {what}"
        elif found.module.split(".")[0] in OURS and not any(found.is_within(package) for package in allowed):
            yield f"{path}:{found.line}: {module} may import of ours only {', '.join(allowed)}, not {what}"


def sources(root: Path) -> Iterator[tuple[Path, str]]:
    """The source files under the packages with rules, with their module names."""
    for package in ("_native", "backends", "bench", "inferd_client", "server"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SUFFIXES:
                parts = path.relative_to(root).with_suffix("").parts
                yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_follow_the_design() -> None:
    found = [text for path, module in sources(ROOT) for text in violations(path, module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("_native/a.pyx", "cimport inferd.server.engine"),
        ("server/app.py", "import asyncio, server.errors"),
        ("_native/a.pyx", "from inferd.server.engine.lane cimport Lane"),
        ("_native/a.pxd", "from inferd.backends cimport api"),
        ("_native/a.pyx", "def f():\n    from inferd.server import errors\n"),
        ("_native/a.pyx", "from inferd.server.errors import (\n    NotFound,\n)"),
        ("backends/api.py", "import torch"),
        ("backends/x.py", "from inferd.server.errors import NotFound"),
        ("backends/x.py", "from inferd.backends.y import other"),
        ("backends/x/native.pyx", "from inferd.backends.y cimport other"),
        ("server/engine/e.py", "import grpc"),
        ("server/engine/e.py", "def f():\n    from grpc import aio\n"),
        ("server/engine/e.py", "from inferd.backends import pytorch"),
        ("server/engine/e.py", "from ..front import native"),
        ("server/engine/__init__.py", "from .. import app"),
        ("server/rpc/r.py", "import grpc.aio"),
        ("server/rpc/r.py", "from inferd.server.front import native"),
        ("server/front/f.py", "from inferd.server.app import run"),
        ("server/app.py", "import socket"),
        ("server/settings/options.py", "from inferd.server.engine import config"),
        ("bench/growth.py", "from tests.framing import framed"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"# a comment\n{text}\n")
    assert [found for source, module in sources(tmp_path) for found in violations(source, module)], text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "_native/a.pyx",
            "from libc.stdint cimport int64_t\nfrom inferd._native.protobuf.codec cimport Request\nimport asyncio",
        ),
        ("_native/a.pyx", "from . cimport codec"),
        ("backends/x.py", "def f():\n    import torch\n\nfrom inferd.backends.api import Backend"),
        ("backends/x/native.pyx", "from inferd.backends.x cimport y\nfrom inferd._native cimport batch"),
        (
            "server/engine/config/spec.py",
            "from inferd.backends.api import ModelSpec\nfrom . import parse\nfrom inferd.server import errors",
        ),
        ("server/front/grpcio.py", "import grpc\nfrom inferd.server.rpc import infer"),
        ("inferd_client/pb/a_pb2.py", "from inferd_client.pb import pool as _pool"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert [found for source, module in sources(tmp_path) for found in violations(source, module)] == []


DEPENDENCIES = {"cyclopts", "google", "grpc", "grpc_health", "grpc_reflection", "numpy", "uvloop"}
"""Packages that `dependencies` of pyproject.toml installs, by their import names."""

ON_DEMAND = ("server.observe.tracing.otel", "server.tools.screen", "server.engine.repository.remote")
"""Modules that are imported by the function that needs them, with the package of an extra."""


def at_the_start(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that a module imports as soon as it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def test_the_server_starts_with_its_dependencies_alone() -> None:
    """What an extra installs is imported by the function that needs it."""
    for path, module in sources(ROOT):
        starts = module.startswith(("server.", "_native.")) and not module.startswith(ON_DEMAND)
        if path.suffix == ".py" and (starts or module in ("backends.api", "backends.loader", "backends.parameters")):
            found = set(at_the_start(ast.parse(path.read_text()))) - DEPENDENCIES - {*OURS, *sys.stdlib_module_names}
            assert not found, f"{path} imports {', '.join(sorted(found))} when it is imported"


NATIVE_LAYERS = (
    "protobuf", "", "memory", "cuda", "transport", "request", "tensors", "scheduling", "execution", "gpu", "sequences",
    "caching", "service", "ensembles",
)  # fmt: skip
"""The packages of `_native` from the ground up; "" are the modules that are in none. A package imports from those
before it; transport, which knows no inference, has none of inference before it."""

ENGINE_LAYERS = (
    "housekeeping", "pbtxt", "repository", "config", "instances", "models", "loading", "caching", "",
)  # fmt: skip
"""The same of `server.engine`, where the modules that are in none put it together."""

LAYERS = {"_native": NATIVE_LAYERS, "server.engine": ENGINE_LAYERS}


def layer_of(module: str, package: str) -> str:
    first = module[len(package) + 1 :].split(".")[0]
    return first if first in LAYERS[package] else ""


def upward(root: Path, package: str) -> set[tuple[str, str]]:
    """The layers of a package that import from one above them, with that one."""
    order = LAYERS[package].index
    found = set()
    for path, module in sources(root):
        if not within(module, package):
            continue
        text = path.read_text()
        for each in cython_imports(text) if path.suffix in {".pyx", ".pxd"} else python_imports(text):
            there = absolute(each, module, path.stem == "__init__")
            if within(there.module, package):
                layers = layer_of(module, package), layer_of(f"{there.module}.{there.name}", package)
                if order(layers[1]) > order(layers[0]):
                    found.add(layers)
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_packages_import_downward(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package.replace(".", "/")).glob("*/__init__.py")}
    assert folders == {*LAYERS[package]} - {""}
    assert upward(ROOT, package) == set()


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("_native/transport/a.pyx", "from inferd._native.request.request cimport Request", {("transport", "request")}),
        ("_native/memory/a.pyi", "from inferd._native.service.table import ModelTable", {("memory", "service")}),
        ("_native/service/a.pyx", "from inferd._native.transport.stream cimport Stream", set()),
        ("_native/transport/a.pyx", "from inferd._native.atomic cimport load32", set()),
        ("server/engine/config/__init__.py", "from inferd.server.engine.loading import room", {("config", "loading")}),
        ("server/engine/models/a.py", "from inferd.server.engine import engine", {("models", "")}),
        ("server/engine/models/a.py", "def f():\n    from ..loading import load", {("models", "loading")}),
        ("server/engine/a.py", "from inferd.server.engine import config", set()),
    ],
)
def test_an_upward_import_is_caught(tmp_path: Path, file: str, text: str, found: set[tuple[str, str]]) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")
    assert upward(tmp_path, "_native" if file.startswith("_native") else "server.engine") == found


def imported(root: Path, package: str) -> dict[str, set[str]]:
    """By module of a package: the others of it that it imports, anywhere in its text, also for types alone.

    Only the module counts that is named: a package, which Python imports with each of its modules, does not. A .pyx and
    its .pxd are one module. A .pyi does not count: its module may return an object of one that is above it.
    """
    known = {module for _, module in sources(root)}
    out: dict[str, set[str]] = {module: set() for module in known if within(module, package)}
    for path, module in sources(root):
        if module in out and path.suffix != ".pyi":
            text = path.read_text()
            for each in python_imports(text) if path.suffix == ".py" else cython_imports(text):
                found = absolute(each, module, path.stem == "__init__")
                whole = f"{found.module}.{found.name}"
                out[module].add(whole if whole in known else found.module)
    return {module: names & out.keys() - {module} for module, names in out.items()}


def circles(root: Path, package: str) -> set[str]:
    """The modules of a package that import themselves by way of others."""
    direct = imported(root, package)
    reached = {module: set(others) for module, others in direct.items()}
    grown = True
    while grown:
        grown = False
        for others in reached.values():
            before = len(others)
            others |= set().union(*(reached[other] for other in others))
            grown |= len(others) > before
    return {module for module, others in reached.items() if module in others}


@pytest.mark.parametrize("package", ["_native", "backends", "inferd_client", "server"])
def test_modules_import_in_no_circle(package: str) -> None:
    assert circles(ROOT, package) == set()


@pytest.mark.parametrize(
    "texts",
    [
        {
            "a.py": "from . import b",
            "b.py": "def f():\n    from .c import x",
            "c.py": "from .a import y",
            "d.py": "from .a import y",
        },
        {
            "a.pxd": "from inferd.backends.python.worker cimport b",
            "b.pyx": "from inferd.backends.python.worker.c cimport (\n    X,\n    Y,\n)",
            "c.pxd": "from libc.stdint cimport int64_t",
            "c.pyx": "from inferd.backends.python.worker.a cimport Y",
            "a.pyi": "from inferd.backends.python.worker.d import Z",
            "d.pyx": "from inferd.backends.python.worker.a cimport Y",
        },
    ],
    ids=["Python", "Cython"],
)
def test_a_circle_is_caught(tmp_path: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = tmp_path / "backends" / "python" / "worker" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    package = "backends.python.worker"
    assert circles(tmp_path, package) == {f"{package}.{name}" for name in "abc"}


def test_every_module_has_a_rule() -> None:
    assert [module for _, module in sources(ROOT) if rule_of(module) is None] == []


@pytest.mark.parametrize("module", ["inferd.server.cli", "inferd.server.app", "inferd.backends.loader"])
def test_starting_imports_no_framework(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist")
    code = f"import sys, {module}; print(*sorted({set(FRAMEWORKS)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
