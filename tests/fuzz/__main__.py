"""Coverage-guided fuzzing with libFuzzer: `python -m tests.fuzz [--seconds 60] [target ...] [-- libFuzzer options]`.

Each target is tests/fuzz/NAME_target.pyx, a Cython module with `run(argv)`, whose first comment states its invariant.
It and the extensions under test are built by clang into build/fuzz, instrumented for coverage and with the address and
undefined-behaviour sanitizers, and run in the ordinary interpreter with libFuzzer preloaded as a shared library.

The seeds are in tests/fuzz/corpus/NAME; what a run finds is kept in fuzz-corpus/NAME, which git ignores. A finding ends
the run with a non-zero status and leaves the input in fuzz-corpus/NAME-findings: add it to the seeds with the fix.

Needs clang and its run-time libraries (Debian: clang, libclang-rt-14-dev).
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
KEPT = ROOT / "fuzz-corpus"

# Each target: the modules of ours that it is linked against, instrumented.
TARGETS = {
    "codec": [
        "inferd._native.protobuf.wire",
        "inferd._native.protobuf.codec",
        "inferd._native.protobuf.contents",
        "inferd._native.protobuf.encoding",
        "inferd._native.protobuf.messages",
    ],
    "worker": [
        "inferd._native.memory.arena",
        "inferd._native.memory.resource",
        "inferd.backends.python._attend",
        "inferd.backends.python._bls",
        "inferd.backends.python._bls_responses",
        "inferd.backends.python._bls_calls",
        "inferd.backends.python._channel",
        "inferd.backends.python._done",
        "inferd.backends.python._execute",
        "inferd.backends.python._grants",
        "inferd.backends.python._link",
        "inferd.backends.python._loans",
        "inferd.backends.python._record",
        "inferd.backends.python._responses",
        "inferd.backends.python._side",
        "inferd.backends.python._slots",
    ],
}
OPTIONS = {"worker": ["-len_control=0"]}  # a script of few bytes does not get far
# What is not instrumented comes from the source tree.
PACKAGE = "from pkgutil import extend_path\n\n__path__ = extend_path(__path__, __name__)\n"

CLANG = os.environ.get("CLANG", "clang")
SANITIZERS = "address,undefined"
# Cython's own glue adds 0 to NULL and calls through other function types.
CHECKS = [f"-fsanitize={SANITIZERS}", "-fno-sanitize=function,pointer-overflow", "-fno-sanitize-recover=undefined"]


def clang(*arguments: str) -> str:
    return subprocess.run([CLANG, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def runtime(name: str) -> Path:
    """The path of clang's run-time library with this file name, without the machine."""
    stem, suffix = name.rsplit(".", 1)
    file = f"libclang_rt.{stem}-{os.uname().machine}.{suffix}"
    path = Path(clang(f"-print-file-name={file}"))
    if not path.is_absolute():
        raise SystemExit(f"fuzzing needs {file}: apt-get install clang libclang-rt-14-dev")
    return path


def library(module: str) -> Path:
    return BUILD.joinpath(*module.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))


def fuzzer_library() -> Path:
    """libFuzzer as a shared library. It is preloaded before the address sanitizer's, whose stubs of the coverage
    functions would come first otherwise."""
    out = BUILD / "libfuzzer.so"
    if not out.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        archive = str(runtime("fuzzer_no_main.a"))
        clang("-shared", "-Wl,--whole-archive", archive, "-Wl,--no-whole-archive", "-lstdc++", "-lm", "-o", str(out))
    return out


def compile_module(module: str) -> None:
    """Build one Cython module into BUILD unless it is newer than all native sources."""
    out = library(module)
    folders = ("_native", "backends/python", "tests/fuzz")
    sources = [p for d in folders for p in (ROOT / d).rglob("*") if p.suffix in (".pyx", ".pxd", ".pxi", ".h")]
    if out.exists() and out.stat().st_mtime > max(p.stat().st_mtime for p in (*sources, Path(__file__))):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    pyx = ROOT.joinpath(*module.split(".")).with_suffix(".pyx")
    c = out.with_name(f"{pyx.stem}.c")
    directives = ("cdivision=True", "wraparound=False", "freethreading_compatible=False")
    options = [option for directive in directives for option in ("-X", directive)]
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", "--module-name", module, *options, str(pyx), "-o", str(c)], check=True
    )
    clang("-shared", "-fPIC", "-O1", "-g", "-w", "-fno-omit-frame-pointer", "-fsanitize=fuzzer-no-link", *CHECKS,
          "-shared-libasan", f"-I{sysconfig.get_path('include')}", f"-I{ROOT}", str(c), "-o", str(out))  # fmt: skip


def build(target: str) -> None:
    for module in [*TARGETS[target], f"tests.fuzz.{target}_target"]:
        compile_module(module)
        for package in library(module).relative_to(BUILD).parents[:-1]:
            own = ROOT / package / "__init__.py"
            (BUILD / package / "__init__.py").write_text(PACKAGE + (own.read_text() if own.exists() else ""))


def corpus(target: str) -> list[str]:
    """The folders of findings (first) and of seeds."""
    seeds = ROOT / "tests" / "fuzz" / "corpus" / target
    kept = KEPT / target
    for folder in (seeds, kept, KEPT / f"{target}-findings"):
        folder.mkdir(parents=True, exist_ok=True)
    return [str(kept), str(seeds)]


def fuzz(target: str, options: list[str]) -> int:
    """Run one target in a process of its own; its exit status."""
    code = f"import sys; from tests.fuzz.{target}_target import run; run(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", code]
    environment = os.environ | {
        "LD_PRELOAD": f"{fuzzer_library()} {runtime('asan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_abort=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(BUILD), str(ROOT)]),
    }
    # The program's name, which libFuzzer gives to a shell when it starts itself again (-merge=1, -fork=1).
    name = shlex.join(command) + " -"
    return subprocess.run([*command, name, *options], cwd=ROOT, env=environment).returncode


def main() -> int:
    own, theirs = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, theirs = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    arguments = parser.parse_args(own)
    if shutil.which(CLANG) is None:
        raise SystemExit(f"fuzzing needs {CLANG}: apt-get install clang libclang-rt-14-dev")
    status = 0
    for target in arguments.targets or TARGETS:
        build(target)
        options = [
            f"-max_total_time={arguments.seconds}",
            f"-artifact_prefix={KEPT / f'{target}-findings'}/",
            "-max_len=1024",
            "-detect_leaks=0",
            "-print_final_stats=1",
            *OPTIONS.get(target, []),
        ]
        words = ROOT / "tests" / "fuzz" / f"{target}.dict"
        if words.exists():
            options.append(f"-dict={words}")
        status |= fuzz(target, [*options, *theirs, *corpus(target)])
    return status


if __name__ == "__main__":
    sys.exit(main())
