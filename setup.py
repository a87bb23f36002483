"""Build of the Cython extensions; everything else about the package is in pyproject.toml.

Switches (environment variables):
    INFERD_BUILD   release (default) | debug (bounds checks, -O1 -g, line numbers) | asan (debug with
                   address and undefined-behaviour sanitizers) | tsan (debug with the thread sanitizer) | coverage
                   (what release does, compiled so that gcov can count it; tools/coverage.py) | quick (what release
                   does with assertions, built in the least time) | checked (release with assertions: tests/mutants)
    INFERD_COMMIT  of the sources, for `inferd --version`, where there is no git to ask
    INFERD_ONLY    comma-separated module names: build only these (for development); none of
                   that name builds none
    INFERD_PART    of an in-place build: server (what is installed) or checks (those of bench/ and tests/);
                   both by default
"""

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.editable_wheel import _StaticPth, editable_wheel
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
BUILD = os.environ.get("INFERD_BUILD", "release")
FLAGS = {
    "release": ["-O2", "-g0", "-DNDEBUG"],  # line numbers cost a third of the time; functions keep their names
    # the interpreter's own flags define NDEBUG
    "debug": ["-O1", "-g", "-UNDEBUG"],
    "asan": ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"],
    "tsan": ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", "-fsanitize=thread"],
    "coverage": ["-O0", "-g0", "-DNDEBUG", "--coverage"],
    "quick": ["-O0", "-g0", "-UNDEBUG"],
    "checked": ["-O2", "-g0", "-UNDEBUG"],
}
IN_PLACE = "--inplace" in sys.argv
# Those of the checks are of the source tree, no parts of the package.
FOLDERS = {"server": ["inferd/_native", "inferd/backends", "inferd_client"], "checks": ["bench", "tests"]}
ZLIB_USERS = {"inferd._native.transport.compression"}
OPENSSL_USERS = {"inferd._native.transport.libraries", "inferd._native.transport.tls"}
NGHTTP2_USERS = {
    "inferd._native.service.response_store",
    "inferd._native.request.bridge",
    "inferd._native.service.authorizer",
    "inferd._native.service.forwarding",
    "inferd._native.service.infer",
    "inferd._native.service.submission",
    "inferd._native.transport.call",
    "inferd._native.transport.connection",
    "inferd._native.transport.direct_read",
    "inferd._native.transport.endpoint",
    "inferd._native.transport.errorinfo",
    "inferd._native.transport.eviction",
    "inferd._native.transport.expiry",
    "inferd._native.transport.handshake",
    "inferd._native.transport.head",
    "inferd._native.service.exchange",
    "inferd._native.transport.http2",
    "inferd._native.transport.incoming",
    "inferd._native.transport.io_thread",
    "inferd._native.transport.libraries",
    "inferd._native.transport.message_compression",
    "inferd._native.transport.sockets",
    "inferd._native.transport.stream",
    "inferd._native.transport.trim",
    "inferd._native.transport.unary",
}
# Sources in C beside those in Cython, and what the linker is told: the library of a backend names this one.
C_SOURCES = {
    "inferd.backends.triton_api._host": [
        f"inferd/backends/triton_api/{name}.c"
        for name in ("received", "calls", "models", "requests", "responses", "server", "unsupported")
    ],
}
# A library without the interpreter, for the interpreters of workers; sanitizers are the server's.
PLAIN = {"inferd.backends.python.worker._outlive": "inferd/backends/python/worker/_outlive.c"}
LINK_FLAGS = {"inferd.backends.triton_api._host": ["-Wl,-soname,libtritonserver.so"]}


# What pkg-config must find, and the packages of Debian.
NGHTTP2 = ("libnghttp2 >= 1.43", "libnghttp2 1.43 or newer", "libnghttp2-dev")
OPENSSL = ("openssl >= 3.0", "OpenSSL 3.0 or newer", "libssl-dev")


def pkg_config(flag: str, library: tuple[str, str, str]) -> list[str]:
    """The compiler or linker flags of the library, or one sentence that says how to get it."""
    wanted, name, package = library
    try:
        return subprocess.run(["pkg-config", flag, wanted], check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(
            f"inferd needs {name} with its headers, found through pkg-config: apt-get install {package} pkg-config"
        ) from None


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def extension(path: Path) -> Extension:
    name = module_name(path)
    http2 = name in NGHTTP2_USERS or name.startswith(("inferd_client.", "bench.nonce."))
    libraries = [NGHTTP2] * http2 + [OPENSSL] * (name in OPENSSL_USERS)
    return Extension(
        name,
        [str(path.relative_to(ROOT)), *C_SOURCES.get(name, ())],
        depends=[str(header.relative_to(ROOT)) for header in path.parent.glob("*.h")] if name in C_SOURCES else [],
        include_dirs=[str(ROOT / "inferd")],
        extra_compile_args=["-std=c11", "-Wall", "-Wno-unused-function", *FLAGS[BUILD]]
        + [flag for library in libraries for flag in pkg_config("--cflags", library)],
        extra_link_args=[flag for flag in FLAGS[BUILD] if flag.startswith(("-fsanitize", "--coverage"))]
        + [flag for library in libraries for flag in pkg_config("--libs", library)]
        + LINK_FLAGS.get(name, []),
        libraries=["pthread", "m"] + (["z"] if name in ZLIB_USERS else []),
    )


def extensions() -> list[Extension]:
    part = os.environ.get("INFERD_PART") if IN_PLACE else "server"
    folders = [folder for each in ([part] if part else FOLDERS) for folder in FOLDERS[each]]
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.pyx"))]
    only = os.environ.get("INFERD_ONLY")
    found = {module_name(path): extension(path) for path in paths}
    if part == "checks":
        return list(found.values())
    for name, source in PLAIN.items():
        if not (ROOT / source).exists():
            continue  # the client alone: tools/client_wheel.py
        found[name] = Extension(
            name, [source], py_limited_api=True, extra_compile_args=["-std=c11", "-Wall", *FLAGS["release"]]
        )
    return [each for name, each in found.items() if not only or name in only.split(",")]


class EditableWheel(editable_wheel):
    """An editable install that is a path to links, which type checkers follow; setuptools' own is a hook of imports."""

    def _select_strategy(self, name: str, _tag: str, _build_lib: str) -> _StaticPth:
        links = ROOT / "build" / "editable"
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir(parents=True)
        for package in ("inferd", "inferd_client"):
            (links / package).symlink_to(ROOT / package)
        return _StaticPth(self.distribution, name, [links])


class Sdist(sdist):
    """The source distribution: no links, the folders themselves are in `inferd`."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        linked = {path.name for path in (ROOT / "inferd").iterdir() if path.is_symlink()}
        inside = {f"inferd/{file}" if file.partition("/")[0] in linked else file for file in files}
        super().make_release_tree(base_dir, sorted(inside))


def note_build() -> None:
    """Write what `inferd --version` tells, and what the sources are compared with."""
    if not (ROOT / "inferd").is_dir():
        return  # the client alone: tools/client_wheel.py
    found = importlib.util.spec_from_file_location("build_record", ROOT / "inferd" / "server" / "build.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        commit = subprocess.run(describe, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git, as in images
        commit = ""
    noted = {
        "kind": BUILD,
        "commit": os.environ.get("INFERD_COMMIT") or commit,
        "sources": module.digest_of_sources(),
        "python": sys.implementation.cache_tag,
    }
    module.RECORD.write_text(json.dumps(noted) + "\n")


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        f"inferd needs an interpreter with the global interpreter lock, and {sys.executable} is built without one "
        f"(free-threaded): use python{sys.version_info.major}.{sys.version_info.minor} instead of its 't' build"
    )

DEBUG = BUILD in ("debug", "asan", "tsan")
EXTENSIONS = extensions()

if EXTENSIONS:
    print(f"{len(EXTENSIONS)} extensions: what has changed is translated to C and compiled ({BUILD})", flush=True)

# A package is made in a folder of its own, from nothing: what lies in build/ from work on the tree is not for it.
PACKAGE = "build/package"
if "bdist_wheel" in sys.argv:
    shutil.rmtree(ROOT / PACKAGE, ignore_errors=True)

if not IN_PLACE:
    note_build()  # what is packed is made from nothing

# The syntax trees of a module are thousands of objects that live until it is written: looking through them for garbage
# takes a third of the translation.
gc.set_threshold(100_000, 5, 5)

setup(
    cmdclass={"editable_wheel": EditableWheel, "sdist": Sdist},
    options={
        "build": {} if IN_PLACE else {"build_base": PACKAGE},
        "build_ext": {"parallel": os.cpu_count() or 1},
    },
    ext_modules=cythonize(
        EXTENSIONS,
        quiet=True,
        force="--force" in sys.argv,
        nthreads=os.cpu_count() or 1,
        build_dir=f"build/cython-{BUILD}",
        compiler_directives={
            "language_level": "3",
            "freethreading_compatible": False,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "embedsignature": True,
            "legacy_implicit_noexcept": False,
            # No module is a program's to inspect or to pickle: functions of the interpreter's own kind, and no methods
            # for pickle, are half of the code to compile.
            "binding": False,
            "auto_pickle": False,
        },
        annotate=DEBUG,
    ),
)

if IN_PLACE and "INFERD_ONLY" not in os.environ and os.environ.get("INFERD_PART") != "checks":
    note_build()
