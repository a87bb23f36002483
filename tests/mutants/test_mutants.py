"""Guards the program that makes mutants: operators make what they say; no trial is drawn, lost or told wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.mutants.__main__ import again, joined, round_robin
from tests.mutants.equivalent import Proof
from tests.mutants.marks import Marks, take
from tests.mutants.noting import bits
from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.packages import drawn, main_of, module_of, parts_of, selected_tests, sources
from tests.mutants.reach import Reach, digest
from tests.mutants.record import Entry, Record, entry, gone, table
from tests.mutants.trial import SAME, SIMULATION, SURVIVED, TESTS, VOID, Trials, Unsound, Verdict

ROOT = Path(__file__).parents[2]
SOURCE = '''
"""A module: if a < b and c: 1."""
cdef enum:
    MOST = 8

cdef int first(int a, char *text) noexcept nogil:
    """It has 1 docstring."""
    cdef int most = 8, lines
    if a < most and text[0] != c"'" and not known(a):
        return 3
    begin(a)
    finish(<int>a,
           0)
    # a comment: a < b
    assert a < 4
    return a


cdef class Second:
    def __init__(self):
        self.size = 0x10
'''


def changes(source: str, operator: str) -> list[tuple[str, str]]:
    return [(each.before, each.after) for each in mutants_of("x.pyx", source) if each.operator == operator]


def body(*lines: str) -> str:
    return "cdef void f() noexcept nogil:\n" + "".join(f"    {line}\n" for line in lines)


def test_statements_are_deleted():
    """Calls, assignments and last returns go; declarations, assertions and texts stay."""
    assert [before for before, _ in changes(SOURCE, "delete")] == [
        "begin(a)",
        "finish(<int>a,\n           0)",
        "return a",
        "self.size = 0x10",
    ]
    deleted = next(each for each in mutants_of("x.pyx", SOURCE) if each.before.startswith("finish"))
    assert deleted.apply(SOURCE) == SOURCE.replace("finish(<int>a,\n           0)", "pass\n")


def test_assertions_stay():
    """They are no code that is shipped. Calls on both sides of one change places, and it stays where it is."""
    source = body("begin(1)", "assert_that(a < b and c == 2)", "finish()")
    assert [each.after for each in mutants_of("x.pyx", source) if each.operator == "swap"] == [
        "finish()\n    assert_that(a < b and c == 2)\n    begin(1)"
    ]
    assert all("assert_that(a < b and c == 2)" in each.apply(source) for each in mutants_of("x.pyx", source))
    assert [after for _, after in changes(source, "constant")] == ["begin(0)", "begin(2)"]


def test_early_returns_are_skipped():
    """A return before the last statement of its function is a mutant of its own kind."""
    assert changes(SOURCE, "return") == [("return 3", "pass")]


def test_comparisons_are_swapped():
    """Each has one other; casts are none."""
    line = "x = <T *>a < b <= c > <T>d >= e == g(h != <U>i) >> 1"
    made = [after for _, after in changes(body(line), "compare")]
    assert made == [
        line.replace("a < b", "a <= b"),
        line.replace("b <= c", "b < c"),
        line.replace("c > ", "c >= "),
        line.replace("d >= e", "d > e"),
        line.replace("e == g", "e != g"),
        line.replace("h != <U>i", "h == <U>i"),
    ]


@pytest.mark.parametrize(
    ("line", "halves"),
    [
        ("if a < 1 and b:", {"if b:", "if a < 1:"}),
        ("if a and b and c:", {"if b and c:", "if a and c:", "if a and b:"}),
        ("return a or b and c", {"return b and c", "return a or c", "return a or b", "return a"}),
        ("x = (a or b) and not c", {"x = not c", "x = (a or b)", "x = (b) and not c", "x = (a) and not c"}),
        ("cdef bint x = f(a or b, c)", {"cdef bint x = f(a, c)", "cdef bint x = f(b, c)"}),
        ('call(a, "if" in b or c)', {"call(a, c)", 'call(a, "if" in b)'}),
        ("x = 1 if a and b else 2", {"x = 1 if b else 2", "x = 1 if a else 2"}),
    ],
)
def test_conditions_are_halved(line: str, halves: set[str]):
    """One side of each `and` and `or` is left, as the language binds them, and nothing else changes."""
    source = body(line, *(["    pass"] if line.endswith(":") else []))
    made = changes(source, "half")
    assert {after for _, after in made} == halves
    assert len(made) == len(halves)


def test_calls_are_swapped():
    """Two calls that stand one behind the other in one block; not one of another block, nor an assignment."""
    source = body("a(1)", "b.c(2)", "x = d()", "if e():", "    g()", "h()")
    assert changes(source, "swap") == [("a(1)\n    b.c(2)", "b.c(2)\n    a(1)")]


def test_constants_change_by_one():
    """Whole numbers, to nothing below zero; not those of texts, comments and declared sizes."""
    source = body("cdef char text[4]", "cdef int x = 0", "y = 0x0f + 1.5  # 7", "z = 'a 3' + a1[2u]")
    assert [after for _, after in changes(source, "constant")] == [
        "cdef int x = 1",
        "y = 14 + 1.5",
        "y = 16 + 1.5",
        "z = 'a 3' + a1[1u]",
        "z = 'a 3' + a1[3u]",
    ]


def test_the_zero_of_a_function_that_only_raises_is_no_constant():
    """Nobody reads it."""
    silent = "cdef int f() except -1:\n    if a:\n        return 0\n    return 0\n"
    assert changes(silent, "constant") == []
    assert len(changes(silent.replace("return 0", "return 1", 1), "constant")) == 3


def test_only_functions_are_changed():
    """What stands in none, and signatures, stay as they are."""
    assert changes("cdef enum:\n    A = 1\nB = 2\ncdef int f(int a=3) except -1:\n    pass\n", "constant") == []


def test_a_change_is_made_once():
    """If two operators make the same source, there is one mutant; equal statements have names of their own."""
    mutants = mutants_of("x.pyx", body("a(1)", "a(1)", "b(a and a)"))
    texts = [each.apply(body("a(1)", "a(1)", "b(a and a)")) for each in mutants]
    assert len(set(texts)) == len(texts)
    assert len({each.key for each in mutants}) == len(mutants)
    assert [each.nth for each in mutants if each.operator == "delete" and each.before == "a(1)"] == [0, 1]


@pytest.mark.parametrize("package", sorted(sources(ROOT)))
def test_sources_are_understood(package: str):
    """Every mutant of the native code changes only the statement that it names, at the line that it names."""
    for file in sources(ROOT)[package]:
        source = (ROOT / file).read_text()
        lines = source.splitlines()
        mutants = mutants_of(file, source)
        assert len({each.key for each in mutants}) == len(mutants)
        for each in mutants:
            assert each.function
            assert any(line.strip() in lines[each.line - 1] for line in each.before.splitlines())
            changed = each.apply(source)
            assert len(changed) - len(source) == len(each.text) - (each.end - each.start)
            assert changed[: each.start] == source[: each.start]


def laid(root: Path, **texts: str) -> list[str]:
    """Sources, by their names."""
    for name, text in texts.items():
        (root / f"{name}.pyx").write_text(text)
    return [f"{name}.pyx" for name in texts]


def test_the_same_number_draws_the_same(tmp_path: Path):
    """The order depends on the number, and not on what else there is in the sources."""
    one, two = body("a(1)", "b(2)", "c(3)", "d(4)"), body("e(1)", "g(2)", "h(3)")
    first = [each.key for each in drawn(tmp_path, laid(tmp_path, one=one, two=two), 7)]
    assert [each.key for each in drawn(tmp_path, ["two.pyx", "one.pyx"], 7)] == first
    assert [each.key for each in drawn(tmp_path, ["one.pyx", "two.pyx"], 8)] != first
    files = laid(tmp_path, one="# above\n" + one + body("new(5)").replace(" f(", " added("), two=two)
    later = [each for each in drawn(tmp_path, files, 7) if each.function == "f"]
    assert [each.key for each in later] == first
    assert sorted(first) != first


def verdict_entry(mutant: Mutant, outcome: str, found: str = "") -> Entry:
    return entry(mutant, Verdict(outcome, found, 3, {"build": 1.0}), 7, "abc")


def test_a_run_goes_on_from_its_record(tmp_path: Path):
    """What was tried is not tried again, whenever the run before was killed; packages take turns."""
    for folder in ("p", "q"):
        (tmp_path / folder).mkdir()
        laid(tmp_path / folder, one=body("a(1)", "b(2)", "c(3)", "d(4)"))
    queues = [drawn(tmp_path, [f"{folder}/one.pyx"], 7) for folder in ("p", "q")]
    record = Record(tmp_path / "r.jsonl")
    tried = []
    turns = round_robin(record, queues, 3)
    for _ in range(3):
        mutant = next(turns)
        tried.append(mutant)
        record.add(verdict_entry(mutant, TESTS))
    assert [each.file for each in tried] == ["p/one.pyx", "q/one.pyx", "p/one.pyx"]
    with record.path.open("a") as file:
        file.write(json.dumps({"key": "cut short"})[:9])  # as a kill leaves it
    record = Record(record.path)
    assert [each.key for each in record.entries] == [each.key for each in tried]
    for mutant in round_robin(record, queues, 3):
        assert mutant.key not in record.last()
        record.add(verdict_entry(mutant, SAME if len(record.entries) == 3 else SURVIVED))
    counted = [each for each in Record(record.path).entries if each.outcome != SAME]
    assert sorted(each.file for each in counted) == ["p/one.pyx"] * 3 + ["q/one.pyx"] * 3
    assert len(Record(record.path).entries) == 7


def test_survivors_are_tried_again(tmp_path: Path):
    """The last trial counts, and the first is remembered; survivors that the sources no longer have are left alone."""
    queue = drawn(tmp_path, laid(tmp_path, one=body("a(1)", "b(2)")), 7)
    record = Record(tmp_path / "r.jsonl")
    for mutant, outcome in zip(queue, (SURVIVED, TESTS, SURVIVED, SIMULATION), strict=False):
        record.add(verdict_entry(mutant, outcome))
    assert [each.key for each in again(record, [queue[:2]], SURVIVED)] == [queue[0].key]
    record.add(verdict_entry(queue[0], TESTS))
    assert record.last()[queue[0].key].outcome == TESTS
    assert record.first()[queue[0].key].outcome == SURVIVED


def test_what_simulations_said_alone_becomes_part_of_the_record(tmp_path: Path):
    """What they found counts, also where only tests had found it; tests are asked for what nobody has tried."""
    queue = drawn(tmp_path, laid(tmp_path, one=body("a(1)", "b(2)")), 7)
    record = Record(tmp_path / "r.jsonl")
    record.add(verdict_entry(queue[0], TESTS))
    record.add(verdict_entry(queue[1], TESTS))
    outcomes = (SIMULATION, SURVIVED, SIMULATION, SURVIVED)
    said = {mutant.key: verdict_entry(mutant, outcome) for mutant, outcome in zip(queue, outcomes, strict=False)}
    assert [each.key for each in joined(record, said, [queue])] == [queue[3].key]
    found = {key: each.outcome for key, each in record.last().items()}
    assert found == dict(zip([each.key for each in queue], (SIMULATION, TESTS, SIMULATION), strict=False))
    assert record.first()[queue[0].key].outcome == TESTS


def test_the_table_counts(tmp_path: Path):
    """What is proved, or has the same bytes, is no survivor; the first trials have sums of their own."""
    queue = drawn(tmp_path, laid(tmp_path, one=body("a(1)", "b(2)")), 7)
    record = Record(tmp_path / "r.jsonl")
    for mutant, outcome in zip(queue, (SURVIVED, SIMULATION, SAME, SURVIVED, TESTS, VOID), strict=False):
        record.add(verdict_entry(mutant, outcome))
    proved, survivor = queue[0], queue[3]
    proof = Proof(proved.file, proved.function, proved.before, proved.after, "nobody looks")
    text = table(record, [proof])
    assert "| **all** | 5 | 1 | 1 | 1 | 1 | 1 | 33 % | 67 % |" in text
    assert "nobody looks" in text
    assert f"-{survivor.before.splitlines()[0]}" in text
    record.add(verdict_entry(survivor, TESTS))
    text = table(record, [proof])
    assert "| **all** | 5 | 1 | 1 | 1 | 2 | 0 | 33 % | 100 % |" in text
    assert "| **all** | 5 | 1 | 1 | 1 | 1 | 1 | 33 % | 67 % |" in text


def test_a_survivor_leaves_with_its_line(tmp_path: Path):
    """A source that no longer has the mutant has no survivor; the first trial stays counted."""
    queue = drawn(tmp_path, laid(tmp_path, one=body("a(1)", "b(2)")), 7)
    record = Record(tmp_path / "r.jsonl")
    for mutant in queue:
        record.add(verdict_entry(mutant, SURVIVED))
    assert gone(record, tmp_path) == set()
    laid(tmp_path, one=body("a(1)"))
    left = gone(record, tmp_path)
    assert {each.key for each in queue if each.before == "b(2)"} <= left
    assert not any(each.key in left for each in queue if each.before == "a(1)")
    before, _, after = table(record, [], left).partition("## At the first trial of each")
    assert f"| {len(queue) - len(left)} | 0 % | 0 % |" in before
    assert f"| {len(queue)} | 0 % | 0 % |" in after
    (tmp_path / queue[0].file).unlink()
    assert gone(record, tmp_path) == {each.key for each in queue}


ONCE, ALWAYS = "tests/part/test_x.py::test_once", "tests/part/test_x.py::test_always"
CRASHED = """\
tests/part/test_x.py::test_one PASSED                                        [ 50%]
tests/part/test_x.py::test_two[a b]
no more
"""


class FakeCopy:
    """A tree whose extension is its source, without comments. What fails is named by a word in it."""

    def __init__(self, root: Path, simulated: dict[str, str], tested: dict[str, str]) -> None:
        self.root = root
        self.simulated = simulated
        self.tested = tested
        self.ran: list[str] = []
        self.told: list[str] = []

    def extension(self, file: str) -> Path:
        return self.root / f"{file}.so"

    def build(self, file: str) -> None:
        source = (self.root / file).read_text()
        if "broken" in source:
            raise RuntimeError("x.pyx:1: it is\n\nbroken")
        self.extension(file).write_text(source.partition("#")[0].rstrip())

    def digest(self, file: str) -> str:
        return self.extension(file).read_text()

    def simulate(self, *attempts: tuple[str, ...]) -> tuple[str, str]:
        assert all(isinstance(argument, str) for arguments in attempts for argument in arguments)
        self.ran.append("simulation")
        self.told += [argument for arguments in attempts for argument in arguments]
        built = self.extension("a/x.pyx").read_text() if self.extension("a/x.pyx").exists() else ""
        return next((said for word, said in self.simulated.items() if word in built), ""), "simulations 5, calls 9"

    def run(self, command: list[str]) -> CompletedProcess[str]:
        self.ran.append("tests")
        self.told += command
        built = self.extension("a/x.pyx").read_text()
        left_out = {part.partition("=")[2] for part in command if part.startswith("--deselect")}
        for word, test in self.tested.items():
            if word in built and test not in left_out:
                if test == "crash":
                    return CompletedProcess(command, -11, CRASHED, "Segmentation fault")
                if test == ONCE:
                    self.tested = {}
                return CompletedProcess(command, 1, f"ERROR    a log: of it\nFAILED {test} - it is wrong\n", "")
        return CompletedProcess(command, 0, "", "")


def tried(tmp_path: Path, change: str, simulated: dict[str, str], tested: dict[str, str]) -> tuple[Verdict, FakeCopy]:
    (tmp_path / "a").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/part").mkdir()
    (tmp_path / "tests/part/test_x.py").write_text("from a.x import y")
    source = "sound\n"
    (tmp_path / "a/x.pyx").write_text(source)
    copy = FakeCopy(tmp_path, simulated, tested)
    trials = Trials(copy)  # type: ignore[arg-type]
    trials.prepare()
    assert trials.seeds == 5
    copy.ran.clear()
    verdict = trials.try_mutant(Mutant("a/x.pyx", 1, "f", "delete", "sound", change, 0, 0, 5, change))
    assert (tmp_path / "a/x.pyx").read_text() == source
    assert copy.extension("a/x.pyx").read_text() == source.strip()
    return verdict, copy


def test_a_mutant_that_does_not_compile_is_none(tmp_path: Path):
    """A mutant that does not compile is not counted as found."""
    assert tried(tmp_path, "broken", {}, {})[0].outcome == VOID


def test_the_same_extension_is_equivalent(tmp_path: Path):
    """No simulation or test runs for a mutant that is compiled to the same bytes."""
    verdict, copy = tried(tmp_path, "sound # changed", {}, {})
    assert verdict.outcome == SAME
    assert copy.ran == []


def test_simulations_come_first(tmp_path: Path):
    """What they find is not given to tests."""
    verdict, copy = tried(tmp_path, "wrong", {"wrong": "seed 3: no"}, {"wrong": "test"})
    assert (verdict.outcome, verdict.found, verdict.seeds) == (SIMULATION, "seed 3: no", 5)
    assert copy.ran == ["simulation"]


def test_a_test_finds_what_it_fails_for_twice(tmp_path: Path):
    """A test that finds a mutant passes with the original, too."""
    verdict, copy = tried(tmp_path, "wrong", {}, {"wrong": "tests/part/test_x.py::test[a b]"})
    assert (verdict.outcome, verdict.found) == (TESTS, "tests/part/test_x.py::test[a b] it is wrong")
    assert copy.ran == ["simulation", "tests", "tests", "tests"]


def test_a_crash_names_the_test_that_had_begun(tmp_path: Path):
    """The crash counts as a failure of that test: the test must crash twice, and not without the mutant."""
    verdict, copy = tried(tmp_path, "wrong", {}, {"wrong": "crash"})
    assert verdict.outcome == TESTS
    assert verdict.found == "tests/part/test_x.py::test_two[a b] the process ends with -11: no more"
    assert copy.ran == ["simulation", "tests", "tests", "tests"]


@pytest.mark.parametrize("tested", [{"wrong": ONCE}, {"wrong": ALWAYS, "sound": ALWAYS}, {}])
def test_what_fails_for_another_reason_finds_nothing(tmp_path: Path, tested: dict[str, str]):
    """A test that fails once, on a busy machine, or without the mutant too."""
    assert tried(tmp_path, "wrong", {}, tested)[0].outcome == SURVIVED


def test_nothing_is_told_where_the_sound_tree_fails(tmp_path: Path):
    """No mutant is tried."""
    with pytest.raises(Unsound):
        tried(tmp_path, "wrong", {"": "seed 0: no"}, {})


def test_the_nearest_tests_come_first():
    """The tests that import the module come first, then those of its package."""
    tests = selected_tests(ROOT, "_native/scheduling/queue.pyx")
    assert tests.index("tests/native/test_queue.py") < tests.index("tests/engine/test_batches.py")
    assert not any(test.startswith(("tests/simulation", "tests/mutants")) for test in tests)
    assert all(selected_tests(ROOT, files[0]) for files in sources(ROOT).values())
    assert "tests/native/test_cuda_driver.py" in selected_tests(ROOT, "_native/cuda/driver.pyx")


MARKED = """\
cdef int f(int a) noexcept nogil:
    'It says so.'
    cdef int b = a
    if a < b:
        begin(a,
              b)
    elif a:
        return 3
    return b
"""


def test_each_statement_has_its_mark():
    """In the line before it; what cannot have one has that of the `if` that it belongs to."""
    marks = Marks(MARKED, 5)
    assert marks.text().splitlines() == [
        "cdef int f(int a) noexcept nogil:",
        "    'It says so.'",
        "    mutants_reached(5)",
        "    cdef int b = a",
        "    mutants_reached(6)",
        "    if a < b:",
        "        mutants_reached(7)",
        "        begin(a,",
        "              b)",
        "    elif a:",
        "        mutants_reached(8)",
        "        return 3",
        "    mutants_reached(9)",
        "    return b",
    ]
    places = {"a < b": 6, "b)": 7, "elif": 6, "return 3": 8, "return b": 9}
    assert {text: marks.number(MARKED.index(text)) for text in places} == places
    assert marks.count == 5


def test_what_was_reached_is_taken_once(tmp_path: Path):
    """The marks of each module are taken once, and the next run begins with none."""
    (tmp_path / "inferd.a").write_bytes(b"\0\1\0\1")
    (tmp_path / "inferd.b").write_bytes(b"\0\0")
    assert take(tmp_path) == {"inferd.a": b"\0\1\0\1"}
    assert take(tmp_path) == {}
    assert bits(b"\0\1\0\1") == "a"


TEST = "tests/part/test_x.py"
ONE, TWO = f"{TEST}::test_one", f"{TEST}::test_two"


@pytest.mark.parametrize(
    ("reached", "ran"),
    [
        (0b110011, ["--these", "12", "11", TWO, ONE]),
        (0b010000, [ONE]),
        (0b001000, ["--takes"]),
        (0, []),
    ],
)
def test_only_what_reaches_a_mutant_runs(tmp_path: Path, reached: int, ran: list[str]):
    """The quickest first; a file of tests that has changed since runs as a whole, and for another source all."""
    source, text = "cdef void f():\n    sound\n", "from a.x import y"
    runs = {"seed 11": 2.0, "seed 12": 1.0, "seed 13": 1.0, "takes 0": 3.0}
    sources = {"a/x.pyx": digest(source)}
    simulated = Reach(runs, {"a/x.pyx": [f"{reached & 15:x}"]}, sources)
    tested = Reach({ONE: 4.0, TWO: 1.0}, {"a/x.pyx": [f"{reached >> 4:x}"]}, sources, {TEST: digest(text)})
    for folder in ("a", "tests/part"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / TEST).write_text(text)
    (tmp_path / "a/x.pyx").write_text(source)

    def told() -> list[str]:
        copy = FakeCopy(tmp_path, {}, {})
        trials = Trials(copy, simulated, tested)  # type: ignore[arg-type]
        trials.prepare()
        copy.told.clear()
        assert trials.try_mutant(Mutant("a/x.pyx", 2, "f", "delete", "s", "w", 0, 19, 24, "wrong")).outcome == SURVIVED
        return [word for word in copy.told if word in ("--these", "11", "12", "13", "--takes") or word.startswith(TEST)]

    assert told() == ran
    (tmp_path / TEST).write_text(text + "\n# changed")
    assert TEST in told()
    tested.tests["tests/part/test_gone.py"] = digest(text)
    assert TEST in told()
    simulated.sources["a/x.pyx"] = "another"
    assert "--takes" in told()


def test_an_included_source_belongs_to_its_module():
    """Mutants of an included source are built with the source that includes it, and have that one's tests."""
    file = "backends/triton_api/outputs.pxi"
    assert main_of(file, ROOT) == "backends/triton_api/_host.pyx"
    assert module_of(file, ROOT) == "inferd.backends.triton_api._host"
    assert parts_of(module_of(file, ROOT), ROOT)[0] == "backends/triton_api/_host.pyx"
    assert file in parts_of(module_of(file, ROOT), ROOT)
    assert "tests/backends/test_triton_api.py" in selected_tests(ROOT, file)
