"""One mutant: does it differ from the original when compiled, and which simulation or test fails with it?"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.mutants.copies import SOME_TAKES, USUAL, Copy
from tests.mutants.operators import Mutant
from tests.mutants.packages import selected_tests
from tests.mutants.reach import SEED, TAKES, Reach

SIMULATED = re.compile(r"^simulations (\d+),", re.MULTILINE)
FAILED_SEED = re.compile(r"seed (\d+): ")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - (.*))?$", re.MULTILINE)
BEGUN = re.compile(r"^(tests/\S+?::.+?)(?: (?:PASSED|SKIPPED|XFAIL)\b.*)?$", re.MULTILINE)
TEST_OPTIONS = ("-x", "-v", "-rfE", "-p", "no:cacheprovider", "-o", "timeout=120", "-o", "faulthandler_timeout=180")
STEADY_CPU = 50.0  # seconds of CPU for simulations of the original
ENOUGH_CPU = 180.0  # the limit for those of a mutant, which may be slower
ENOUGH_TESTS = 90.0  # seconds that the tests for a mutant may take together

UNKNOWN_TEST = 4  # pytest's exit status
MOST_DOUBTS = 20  # failures that prove nothing: the test passes when repeated, or fails with the original, too

VOID = "void"  # it does not compile
SAME = "same code"
SIMULATION = "simulation"
TESTS = "tests"
SURVIVED = "survived"


class Unsound(Exception):
    """The original fails a simulation or does not compile: a failure with a mutant would prove nothing."""


@dataclass
class Verdict:
    """What became of a mutant.

    Attributes:
        outcome: one of the words above.
        found: the failure that found it, or the compiler's error.
        seeds: how many simulations ran.
        seconds: how long each part took; other programs may use the machine.
    """

    outcome: str
    found: str = ""
    seeds: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Trials:
    """Plants mutants in a copy of the tree, one at a time.

    Args:
        copy: the tree; nothing else uses it.
        simulated, tested: which simulations and tests reach which statements, as far as that was measured.
        parts: what judges: "simulations", "tests" or both.
    """

    def __init__(
        self,
        copy: Copy,
        simulated: Reach | None = None,
        tested: Reach | None = None,
        parts: Sequence[str] = ("simulations", "tests"),
    ) -> None:
        self.copy = copy
        self.parts = parts
        self.simulated = simulated or Reach()
        self.tested = tested or Reach()
        self.seeds = 0
        self.cpu = STEADY_CPU
        # The simulations and tests that reach the mutant, the quickest first; None: not measured, so any may.
        self._simulations: list[str] | None = None
        self._tests: list[str] | None = None
        self._originals: dict[str, tuple[bytes, str]] = {}  # file -> (extension module built from it, its digest)
        self._always_failing: set[str] = set()  # tests and seeds that fail with the original, too

    def prepare(self, cpu: float = STEADY_CPU) -> None:
        """Count the seeds that the original passes in `cpu` seconds; each mutant is given as many.

        If simulations were measured, a mutant is given the measured seeds.

        Raises:
            Unsound: the original breaks a rule of the simulation.
        """
        self.cpu = cpu
        if self.simulated.runs:
            self.seeds = sum(run.startswith(SEED) for run in self.simulated.runs)
            return
        found, printed = self.copy.simulate(
            (*USUAL, "--jobs", "1", "--seeds", "100000", "--cpu", str(cpu)), *SOME_TAKES
        )
        if found:
            raise Unsound(found)
        self.seeds = simulated(printed)

    def try_mutant(self, mutant: Mutant) -> Verdict:
        """Judge a mutant. Afterwards the copy has the original again.

        Raises:
            Unsound: the original fails, too.
        """
        path = self.copy.root / mutant.file
        source = path.read_text()
        began = time.monotonic()
        self._simulations = self.simulated.of(mutant, source)
        self._tests = self.tested.of(mutant, source)
        self._original_digest(mutant.file)
        path.write_text(mutant.apply(source))
        try:
            verdict = self._judge(mutant, began)
        finally:
            path.write_text(source)
            self._restore(mutant.file)
        return verdict

    def _judge(self, mutant: Mutant, began: float) -> Verdict:
        verdict = Verdict(VOID)
        try:
            self.copy.build(mutant.file)
        except RuntimeError as error:
            verdict.found = reason(str(error))
        else:
            verdict.outcome = SAME
        verdict.seconds["build"] = seconds_since(began)
        if verdict.outcome == VOID or self.copy.digest(mutant.file) == self._original_digest(mutant.file):
            return verdict
        began = time.monotonic()
        verdict.found, verdict.seeds = self._simulate(mutant)
        verdict.seconds["simulation"] = seconds_since(began)
        if verdict.found:
            verdict.outcome = SIMULATION
            return verdict
        began = time.monotonic()
        verdict.found = self._test(mutant)
        verdict.outcome = TESTS if verdict.found else SURVIVED
        verdict.seconds["tests"] = seconds_since(began)
        return verdict

    def _simulate(self, mutant: Mutant) -> tuple[str, int]:
        """Run the simulations that reach the mutant, the quickest first.

        Returns:
            The failure, empty if there is none; and the number of seeds that passed.
        """
        seeds = 0
        while "simulations" in self.parts:
            try:
                found, printed = self.copy.simulate(*self._attempts())
            except RuntimeError as error:
                self._require_that_original_runs(mutant)
                return f"the simulation does not run: {reason(str(error))}", 0
            seeds += simulated(printed)
            failed = FAILED_SEED.match(found)
            if failed is None or not self.simulated.runs or not self._fails_without(mutant, failed[1]):
                return found[:300], seeds
            self._always_failing.add(f"{SEED} {failed[1]}")
        return "", 0

    def _attempts(self) -> list[tuple[str, ...]]:
        """The arguments of each simulation."""
        usual = (*USUAL, "--jobs", "1", "--cpu")
        if not self.simulated.runs:
            return [(*usual, str(ENOUGH_CPU), "--seeds", str(self.seeds)), *SOME_TAKES]
        known = self.simulated.runs if self._simulations is None else self._simulations
        runs = [run.split() for run in known if run not in self._always_failing]
        seeds = [number for kind, number in runs if kind == SEED]
        attempts = [(*usual, str(self.cpu), "--these", *seeds)] if seeds else []
        return attempts + [SOME_TAKES[int(number)] for kind, number in runs if kind == TAKES]

    def _fails_without(self, mutant: Mutant, seed: str) -> bool:
        """Whether this seed fails with the original, too: the simulation has changed since it was measured."""
        broken = self._replace_extension(mutant.file, self._originals[mutant.file][0])
        try:
            return bool(self.copy.simulate((*USUAL, "--jobs", "1", "--these", seed))[0])
        finally:
            self._replace_extension(mutant.file, broken)

    def _require_that_original_runs(self, mutant: Mutant) -> None:
        """Raise Unsound if the original does not run either: then the machine is the cause."""
        broken = self._replace_extension(mutant.file, self._originals[mutant.file][0])
        try:
            if found := self.copy.simulate(("--seeds", "1", "--jobs", "1", *USUAL))[0]:
                raise Unsound(found)
        except RuntimeError as error:
            raise Unsound(str(error)) from error
        finally:
            self._replace_extension(mutant.file, broken)

    def _chosen_tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach the mutant, the quickest first, up to ENOUGH_TESTS seconds in all.

        Before these come all files of tests that were not measured.
        """
        files = selected_tests(self.copy.root, mutant.file)
        if self._tests is None:
            return files
        known = {file for file in self.tested.tests if self.tested.knows(file, self.copy.root)}
        tests, took = [], 0.0
        for run in self._tests:
            if run.partition("::")[0] in known and took < ENOUGH_TESTS:
                tests.append(run)
                took += self.tested.runs[run]
        return [*(file for file in files if file not in known), *tests]

    def _test(self, mutant: Mutant) -> str:
        """The test that fails twice with the mutant and passes with the original, and its message; empty: none."""
        tests = self._chosen_tests(mutant) if "tests" in self.parts else []
        if not tests:
            return ""
        passed_later: set[str] = set()
        for _ in range(MOST_DOUBTS):
            failed = self._failing(tests, passed_later)
            if failed is None:
                return ""
            test, message = failed
            if not test or test in passed_later:
                return message
            if self._failing([test], set()) is None:
                passed_later.add(test)  # it failed because the machine was busy
                continue
            broken = self._replace_extension(mutant.file, self._originals[mutant.file][0])
            fails_without = self._failing([test], set()) is not None
            self._replace_extension(mutant.file, broken)
            if not fails_without:
                return f"{test} {message}"[:300]
            self._always_failing.add(test)
        return ""

    def _failing(self, tests: list[str], left_out: set[str]) -> tuple[str, str] | None:
        """The first test that fails, and its message. ("", message): pytest ended before any test; None: all pass."""
        options = [f"--deselect={test}" for test in sorted(self._always_failing | left_out) if "::" in test]
        done = self.copy.run([sys.executable, "-m", "pytest", *TEST_OPTIONS, *options, *tests])
        if done.returncode in (0, 5):  # 5: all are left out
            return None
        if done.returncode == UNKNOWN_TEST:
            raise Unsound(f"a test that was measured is not there any more: {reason(done.stderr or done.stdout)}")
        if found := FAILED.search(done.stdout):
            return found[1], found[2] or ""
        ended = f"the process ends with {done.returncode}: {reason(done.stdout)}"
        begun = BEGUN.findall(done.stdout)
        return (begun[-1].strip() if begun else ""), ended

    def _original_digest(self, file: str) -> str:
        """The digest of the extension that the original makes on this machine; built once."""
        if file not in self._originals:
            try:
                self.copy.build(file)
            except RuntimeError as error:
                raise Unsound(f"{file} does not compile: {error}") from error
            extension = self.copy.extension(file)
            assert extension is not None
            self._originals[file] = extension.read_bytes(), self.copy.digest(file)
        return self._originals[file][1]

    def _restore(self, file: str) -> None:
        if file in self._originals:
            self._replace_extension(file, self._originals[file][0])

    def _replace_extension(self, file: str, data: bytes) -> bytes:
        """Replace the extension module; return the bytes of the previous one.

        The old file is removed, not overwritten, because a process may have mapped it.
        """
        extension = self.copy.extension(file)
        assert extension is not None
        before = extension.read_bytes()
        extension.unlink()
        extension.write_bytes(data)
        return before


def simulated(printed: str) -> int:
    """The number of simulations that passed, by what the program has printed."""
    return sum(int(count) for count in SIMULATED.findall(printed))


def reason(text: str) -> str:
    """The last line that a program has printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it says nothing"


def seconds_since(began: float) -> float:
    """The seconds since this time of the monotonic clock."""
    return round(time.monotonic() - began, 1)
