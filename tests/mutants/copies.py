"""A copy of the tree, in which one extension at a time is broken: the tree itself is never touched."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.mutants.packages import main_of, module_of

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "inferd",
    "_native",
    "backends",
    "server",
    "tests",
    "inferd_client",
    "setup.py",
    "pyproject.toml",
    "README.md",
)
MORE = ("bench", "deploy", "docs", "examples", "proto", "tools", "Makefile", "constraints.txt")  # that tests look at
MOST_CPU = 900  # seconds for one process: more, and it does not end
MOST = 7200.0  # seconds for a run: more, and its processes wait for each other, however busy the machine is

# What the simulation prints of a rule that was broken, or of a process that has crashed.
REPORTED = re.compile(r"seed \d+: |take \d+ of seed \d+: ")
FEW = '"operator": false, "regions": false, "hostile": false, "jumps": false'
LEVELS = f'{{"models": ["levels"], "clients": 2, "calls": 30, "cancels": false, "streams": false, {FEW}}}'
ENDS = f'{{"models": ["mourned", "tied"], "clients": 3, "calls": 60, {FEW}}}'  # models that hear how sequences end
USUAL = ("--no-shrink", "--most", "60")
EACH_TAKE = (("--takes", "--first", "4", "--scale", LEVELS), ("--takes", "--first", "5", "--scale", ENDS))
# Of the first 76 mutants that simulations found, the takes found one, and all of them need two minutes.
SOME_TAKES = tuple(("--takes", "4", *arguments[1:]) for arguments in EACH_TAKE)


class Copy:
    """The tree, to be broken. It must be freshly built: extensions are copied as they are.

    Args:
        root: where.
        more: with what the tests need beside what the simulation needs.
    """

    def __init__(self, root: Path, more: bool = False) -> None:
        self.root = root
        for name in (*COPIED, *MORE) if more else COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, symlinks=True)
            elif source.exists():
                shutil.copy2(source, root / name)
        self.environment = os.environ | {"PYTHONPATH": str(root)}
        self.environment.pop("MAKEFLAGS", None)

    def extension(self, file: str) -> Path | None:
        """The extension that is built from a source; None: none is."""
        path = self.root / main_of(file, self.root)
        return next(path.parent.glob(path.stem + ".cpython*.so"), None)

    def build(self, file: str) -> None:
        """The extension of this source, and no other: as it is shipped, and with its assertions.

        Raises:
            RuntimeError: it does not compile.
        """
        self.build_modules([module_of(file, self.root)], INFERD_BUILD="checked")

    def build_modules(self, modules: list[str], **environment: str) -> None:
        """Build these extensions.

        Raises:
            RuntimeError: one does not compile.
        """
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        done = self.run(command, INFERD_ONLY=",".join(modules), **environment)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])

    def digest(self, file: str) -> str:
        """The digest of the extension's bytes: extensions with equal digests do the same."""
        extension = self.extension(file)
        return hashlib.sha256(extension.read_bytes()).hexdigest() if extension else ""

    def simulate(self, *attempts: tuple[str, ...]) -> tuple[str, str]:
        """What simulations with these arguments find, empty for nothing; and all that they print.

        Raises:
            RuntimeError: the simulation itself does not run.
        """
        printed = ""
        for arguments in attempts:
            done = self.run([sys.executable, "-m", "tests.simulation", *arguments])
            printed += done.stdout
            if done.returncode < 0:
                return f"the simulator ends with {signal.Signals(-done.returncode).name}", printed
            if found := next((line for line in done.stdout.splitlines() if REPORTED.match(line)), ""):
                return found, printed
            if done.returncode:
                raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
        return "", printed

    def run(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy. It ends, with all processes that it starts, on time or when this process ends."""
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=limit,
        ) as process:
            try:
                output, errors = process.communicate(timeout=MOST)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            finally:
                if process.returncode is not None:
                    end_group(process.pid)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def limit() -> None:
    """The time that each of its processes may use."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU, MOST_CPU + 10))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_group(group: int) -> None:
    """End what a command that has crashed leaves behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
