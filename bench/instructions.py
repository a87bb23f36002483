"""Instructions of calls and of single lanes, counted by callgrind: the same on every machine, however busy it is.

    python -m bench.instructions                      needs valgrind
    python -m bench.instructions --base FOLDER        beside another tree of this project, built, with this program
    python -m bench.instructions --only calls|lanes [--functions 30]
    python -m bench.instructions --check              fails where more are needed than recorded
    python -m bench.instructions --record "REASON"    records what is needed now in bench/results/instructions.json

Calls (bench.calls): instructions are counted by place: libnghttp2, the C library, and groups of our modules. Those of
the interpreter are left out; those of the C library on its behalf count, some hundreds for each portion of bytes.
Lanes: a request is pushed and taken, by one thread and without contention, in batches of 1 and of 64. System calls and
reading the clock do not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench import messages
from bench.micro import LEVELS, SPEC
from inferd.backends.api import BatchingSpec, ModelSpec, TensorSpec

HERE = Path(__file__).parent.parent
RECORD = HERE / "bench" / "results" / "instructions.json"
TOLERANCE = 0.01
GUARDED_LOADS = ("single", "batch", "large")  # what happens in these does not depend on time
GUARDED_LANES = (("plain", 64), ("levels, limits and timeouts", 1))  # and sizes of batches
LANES: dict[str, ModelSpec] = {
    "plain": SPEC,
    "one shape": replace(
        SPEC,
        inputs=(TensorSpec("INPUT0", "FP32", (16,)),),
        outputs=(TensorSpec("OUTPUT0", "FP32", (16,)),),
    ),
    "no batching": replace(SPEC, batching=None),
    "delay": replace(SPEC, batching=BatchingSpec((1, 64), 1_000_000)),
    "adaptive delay": replace(SPEC, batching=BatchingSpec((), 0, adaptive=True)),
    "levels, limits and timeouts": LEVELS,
}
SIZES = (1, 64)
REQUESTS = 64_000  # enough that making the lane does not show
FUNCTION = "__pyx_pf_*native_speed*lane_ns*"
COLLECTED = re.compile(r"Collected : (\d+)")

CALLS = {"large": 80}
OTHER_CALLS = 3200
LOADS = {
    "single": "one at a time",
    "batch": "32 at once",
    "delay": "32 at once, delay",
    "sampled": "one at a time, one in 100 traced",
    "slow": "one at a time, traced and logged where slow or failed",
    "traced": "one at a time, all traced and logged",
    "large": "4 of 600 kB at once",
}
GROUPS = {  # the first prefix of the module's name counts
    "receive": (
        "transport.http2",
        "transport.incoming",
        "transport.direct_read",
        "transport.connection",
        "transport.endpoint",
        "transport.unary",
    ),
    "headers": (
        "transport.head",
        "transport.headers",
        "transport.compression",
        "service.access",
        "service.authorizer",
        "service.forwarding",
    ),
    "decode": ("protobuf.codec", "protobuf.contents", "protobuf.wire", "protobuf.messages"),
    "encode": ("protobuf", "service.encoding", "inference.answer"),
    "queue": ("scheduling", "request.lane", "request.order"),
    "execute": ("execution", "identity"),
    "submit": ("service", "tensors", "transport.infer", "inference.submission", "inference.binding", "inference.table"),
    "request, way back": ("request", "inference"),
    "memory": ("memory",),
    "send": ("transport",),
}
NAMED = re.compile(r"\((\d+)\)(?: (.*))?$")
Cost = Counter[tuple[str, str]]  # by file and function


# ----------------------------------------------------------------------------------------------------------------------
# Lanes


def lane_instructions(tree: Path, lane: str, size: int) -> float:
    """Instructions for each request."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--toggle-collect={FUNCTION}"]
    command += [python(tree), "-m", "bench.instructions", "--lane", lane, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tree)
    found = COLLECTED.search(done.stderr)
    if found is None:
        raise RuntimeError(f"callgrind did not count:\n{done.stderr}")
    return int(found[1]) / REQUESTS


def run_lane(lane: str, size: int) -> None:
    """The program that callgrind runs."""
    from bench.native_speed import lane_ns

    lane_ns(LANES[lane], messages.identity(64).request, size, REQUESTS // size)


def lanes_table(trees: Sequence[Path]) -> Iterable[str]:
    names = [""] if len(trees) == 1 else [", base", ", now"]
    heads = [f"batches of {size}{name}" for size in SIZES for name in names]
    yield f"| lane | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(heads)
    for lane in LANES:
        cells = []
        for size in SIZES:
            counts = (
                [lane_instructions(tree, lane, size) for tree in trees] if size == 1 or LANES[lane].batching else []
            )
            cells += compared(counts) if counts else [""] * len(trees)
        yield f"| {lane} | {' | '.join(cells)} |"


# ----------------------------------------------------------------------------------------------------------------------
# Calls


def call_instructions(tree: Path, load: str) -> Cost:
    """Instructions for each call."""
    count = CALLS.get(load, OTHER_CALLS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        command += ["--zero-before=getpriority", "--dump-before=getloadavg"]  # bench.calls calls both
        command += [python(tree), "-m", "bench.calls", load, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tree)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
        cost = read_callgrind(out.with_name("out.1"))
    return Counter({where: made / count for where, made in cost.items()})  # type: ignore[misc]


def read_callgrind(path: Path) -> Cost:
    """Read callgrind's file: each function's own instructions, by the file that it is in."""
    names: dict[tuple[str, str], str] = {}
    cost: Cost = Counter()
    where = {"ob": "", "fn": ""}
    of_callee = False
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if line[:1] in "+-*0123456789" and line:
            if not of_callee and " " in line:
                cost[where["ob"], where["fn"]] += int(line.split()[1])
            of_callee = False
        elif equals and key == "calls":
            of_callee = True  # the next line has the cost of the callee
        elif equals and key in ("ob", "fn", "cob", "cfn"):
            found = NAMED.match(value)
            if found is None:
                raise RuntimeError(f"{path}: expected '(number) name', got {line!r}")
            name = names.setdefault((key[-2:], found[1]), found[2])
            if key in where:
                where[key] = name
    return cost


def group_of(file: str) -> str:
    """The part of a call to which the code in this file belongs."""
    name = file.rpartition("/")[2]
    if "nghttp2" in name:
        return "libnghttp2"
    if "cpython" not in name:
        return "" if "python" in name else "C library"
    parts = file.removesuffix(".so").split("/")
    module = (
        ".".join([*parts[parts.index("_native") + 1 : -1], name.partition(".")[0]])
        if "_native" in parts
        else ("identity" if "identity" in name else "")
    )
    for group, beginnings in GROUPS.items():
        if module and module.startswith(beginnings):
            return group
    return ""  # the interpreter's


def calls_table(trees: Sequence[Path], functions: int) -> Iterable[str]:
    for load, title in LOADS.items():
        costs = [call_instructions(tree, load) for tree in trees]
        sums = [Counter[str]() for _ in trees]
        for found, total in zip(costs, sums, strict=True):
            for (file, _), count in found.items():
                total[group_of(file)] += count  # type: ignore[assignment]
            total.pop("", None)
        yield f"| {title} | {'instructions a call |' if len(trees) == 1 else 'base | now |'}"
        yield "|---|" + "---:|" * len(trees)
        ours = [sum(total[group] for group in GROUPS) for total in sums]
        for group in ("libnghttp2", "C library", *GROUPS):
            yield f"| {group} | {' | '.join(compared([total[group] for total in sums]))} |"
        yield f"| our modules | {' | '.join(compared(ours))} |"
        yield f"| all | {' | '.join(compared([sum(total.values()) for total in sums]))} |"
        yield ""
        if functions:
            yield from functions_table(costs[-1], functions)


def functions_table(cost: Cost, most: int) -> Iterable[str]:
    yield "| function | instructions a call |"
    yield "|---|---:|"
    ranked = [(where, count) for where, count in cost.most_common() if group_of(where[0])]
    for (file, function), count in ranked[:most]:
        yield f"| {file.rpartition('/')[2].partition('.')[0]}: {function} | {count:.0f} |"
    yield ""


# ----------------------------------------------------------------------------------------------------------------------
# The guard against getting slower


def guarded() -> dict[str, float]:
    """Instructions of our modules in each guarded row: those of libraries differ from machine to machine."""

    def of_call(load: str) -> float:
        return sum(count for (file, _), count in call_instructions(HERE, load).items() if group_of(file) in GROUPS)

    with ThreadPoolExecutor() as pool:
        rows = {f"a call, {LOADS[load]}": pool.submit(of_call, load) for load in GUARDED_LOADS}
        for lane, size in GUARDED_LANES:
            name = f"a request in a lane, {lane}, batches of {size}"
            rows[name] = pool.submit(lane_instructions, HERE, lane, size)
        return {name: round(row.result(), 1) for name, row in rows.items()}


def toolchain() -> str:
    """What the counts depend on beside the source."""
    compiler = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    return f"gcc {compiler}, python {'.'.join(platform.python_version_tuple()[:2])}, {platform.machine()}"


def record(reason: str) -> None:
    """Record the present counts as the limits."""
    history = json.loads(RECORD.read_text())["history"] if RECORD.exists() else []
    history.append({"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "reason": reason})
    found = {"toolchain": toolchain(), "rows": guarded(), "history": history}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def check() -> int:
    """Compare with the record: 1 if a row needs more by over 1 %."""
    recorded = json.loads(RECORD.read_text())
    if (here := toolchain()) != recorded["toolchain"]:
        print(f"NOT compared: the record is of {recorded['toolchain']}, this is {here}")
        return 0
    slower = 0
    for name, count in guarded().items():
        limit = recorded["rows"].get(name)
        worse = limit is None or count > limit * (1 + TOLERANCE)
        slower += worse
        print(f"{'MORE' if worse else 'ok':4}  {name}: {', '.join(compared([limit or 0, count])[::-1])} recorded")
    if slower:
        print(
            f"{slower} rows need over {TOLERANCE:.0%} more instructions than recorded. If that is worth it, say why: "
            "python -m bench.instructions --record REASON"
        )
    return int(slower > 0)


# ----------------------------------------------------------------------------------------------------------------------


def compared(counts: Sequence[float]) -> list[str]:
    """The counts as text, the last beside the first."""
    cells = [f"{count:,.0f}" for count in counts]
    if len(counts) > 1 and counts[0]:
        cells[-1] += f" ({100 * (counts[-1] / counts[0] - 1):+.1f} %)"
    return cells


def python(tree: Path) -> str:
    """The interpreter with which a tree runs."""
    return sys.executable if tree == HERE else str(tree / ".venv/bin/python")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=("calls", "lanes"))
    parser.add_argument("--base", type=Path, help="another tree, to compare with")
    parser.add_argument("--functions", type=int, default=0, help="print how many of the most expensive functions")
    parser.add_argument("--check", action="store_true", help="compare with the record; 1 where more are needed")
    parser.add_argument("--record", metavar="REASON", help="record what is counted now, and why it changes")
    parser.add_argument("--lane", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lane:
        run_lane(given.lane[0], int(given.lane[1]))
        return 0
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed")
    if given.record:
        record(given.record)
        return 0
    if given.check:
        return check()
    trees = [given.base.resolve(), HERE] if given.base else [HERE]
    if given.only != "lanes":
        for line in calls_table(trees, given.functions):
            print(line, flush=True)
    if given.only != "calls":
        for line in lanes_table(trees):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
