"""An operator reads while requests go on: the metrics of a version as text, and the regions that there are."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any

from inferd._native.memory.shm import CUDA, SHARED, SYSTEM
from inferd._native.service.exposition import KINDS, ModelMetrics
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.kind import Kind
    from tests.simulation.models import Version
    from tests.simulation.simulation import Simulation

US, MS = 1000, 1_000_000
POWERS = tuple(US << power for power in range(26))  # bounds by which every version counts
OTHERS = (1, 100 * US, MS // 2, 5 * MS, 50 * MS, 100 * MS, 1000 * MS)  # by some of them a version counts, too
UNITS = (1, US, MS, 1000 * MS)
# families, and by which names the statistics have the same
COUNTED = {"success": "success", "cache_hits": "cache_hit", "cache_misses": "cache_miss"}
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")  # of a request that is executed
HISTOGRAMS = {
    "request_histogram": "success",
    "queue_histogram": "queue",
    "compute_input_histogram": "compute_input",
    "compute_infer_histogram": "compute_infer",
    "compute_output_histogram": "compute_output",
}
Samples = dict[str, float]  # by what stands in front of the value


def read_metrics(version: Version) -> None:
    """Read all that there is to one version.

    Raises:
        Violation: figures do not agree with each other, or with what was told before.
    """
    kind, lane = version.kind, version.loaded.lane
    random = Random(version.prefix)
    bounds = tuple(sorted({*random.sample(POWERS, random.randrange(12)), *random.sample(OTHERS, 3)}))
    unit, point = random.choice(UNITS), random.random() < 0.5
    metrics = ModelMetrics([(lane, b'model="m",version="1"', not kind.steps, kind.caches, kind.decoupled)])
    earlier = lane.statistics()
    metrics.read()
    later = lane.statistics()
    random = Random(f"{version.prefix} {version.over}")
    examples = sorted((random.choice((1, US, MS - 1, MS, 1 << 60)), b' # {of="%d"} 1' % each) for each in range(3))
    if random.random() < 0.5:
        metrics.illustrate(0, examples)
    else:
        examples = []
    texts = {name: metrics.render(name, name.encode(), unit, bounds, point) for name in sorted(KINDS)}
    found = {name: samples_of(text) for name, text in texts.items()}
    check_examples(version, texts["request_histogram"].decode(), examples if point else [], unit)
    for told in (earlier, later):
        check_books(version, told)
    for name, of in COUNTED.items():
        between(version, name, earlier[of][0], value_of(found[name]), later[of][0])
    for name, of in (("inferences", "inference_count"), ("executions", "execution_count")):
        between(version, name, earlier[of], value_of(found[name]), later[of])
    for name, of in HISTOGRAMS.items():
        between(version, name, earlier[of][0], value_of(found[name], "_count"), later[of][0])
        between(version, name, earlier[of][1], round(value_of(found[name], "_sum") * unit), later[of][1], unit)
    for bound in set(bounds) & set(POWERS):
        few, many = (waits_up_to(bound, each) for each in (earlier, later))
        between(version, f"queue times up to {bound}", few, bucket_of(found["queue_histogram"], bound, unit), many)
    succeeded, failed, _ = lane.totals()
    if succeeded < later["success"][0] or failed < later["fail"][0]:
        raise Violation(f"{version.prefix}: {succeeded} and {failed} are over, where {later} was told before")
    for name, samples in found.items():
        check_histogram(version, name, samples)
    success = value_of(found["success"])
    if value_of(found["request_histogram"], "_count") != success:
        raise Violation(f"{version.prefix}: {success} requests were good, and not as many took time: {found}")
    rows, batches = value_of(found["inferences"]), value_of(found["executions"])
    told = found["batch_histogram"]
    # In a batch are rows, too, whose requests have failed, or that nobody has asked. A request that is executed again
    # and again counts once, when it has ended, and each of its executions may be a batch.
    most = rows
    if kind.repeats:
        executions = version.backend.executions
        most = sum(times for (name, _), times in executions.count.items() if name == kind.name)
        most = math.inf if executions.crowd else most  # whose executions are not counted one by one
    agrees = value_of(told, "_count") == batches and batches <= most and rows <= value_of(told, "_sum")
    # there may be no memory to count a batch of a new size
    if not (agrees or version.backend.executions.is_faulty):
        raise Violation(f"{version.prefix}: {rows} rows in {batches} batches: {told}")
    before, version.told = version.told, {name: value for each in found.values() for name, value in each.items()}
    for name, value in before.items():
        if not name.startswith("pending") and version.told.get(name, 0) < value:
            raise Violation(f"{version.prefix}: {name} was {value}, and is {version.told.get(name)}")


def waits_up_to(bound: int, told: dict[str, Any]) -> int:
    """How many requests have waited no longer than this power of two."""
    return sum(count for us, count in told["queue_times"] if us and us * US <= bound)


def check_books(version: Version, told: dict[str, Any]) -> None:
    """The statistics of a version agree with each other.

    Raises:
        Violation: they do not.
    """
    problem = ""
    if sum(count for _, count in told["queue_times"]) != told["queue"][0]:
        problem = "waits of all times are not as many as waits"
    elif any(told[phase][0] != told["queue"][0] for phase in PHASES):
        problem = "phases are not as many as others"
    elif not 0 <= told["success"][0] - told["queue"][0] <= told["cache_hit"][0]:
        problem = "good requests have neither phases nor an answer that was kept"
    elif is_linear(version.kind) and sum(told[phase][1] for phase in PHASES) > told["success"][1]:
        problem = "the phases of good requests take longer than these"
    elif sum(count for count, _ in told["failures"].values()) != told["fail"][0]:
        problem = "failures of all reasons are not as many as failures"
    elif [rows for rows, *_ in told["batches"]] != sorted({rows for rows, *_ in told["batches"]}):
        problem = "batches are not in the order of their rows"
    elif any(len({phase[0] for phase in phases}) != 1 for _, *phases in told["batches"]):
        problem = "batches of a size have not as many phases of each kind"
    elif any(each["fail"][0] > each["compute_infer"][0] for each in told["responses"]):
        problem = "more responses have failed than were computed"
    if problem:
        raise Violation(f"{version.prefix}: {problem}: {told}")


def is_linear(kind: Kind) -> bool:
    """Whether no two parts of a request are executed at a time: it is of a model, or steps follow each other."""
    sources = [source for step in kind.steps for source in step.inputs.values()]
    return len(set(sources)) == len(kind.steps) and not any(step.decoupled for step in kind.steps)


def between(version: Version, what: str, least: float, value: float, most: float, slack: float = 0) -> None:
    """Check that what was read is no less than what was told before, and no more than what was told then."""
    if not least - slack - 1e-9 * least <= value <= most + slack + 1e-9 * most:
        raise Violation(f"{version.prefix}: {what} is {value}, where {least} was told before and {most} then")


def bucket_of(samples: Samples, bound: int, unit: int) -> float:
    """The count of the bucket with this bound."""
    for name, value in samples.items():
        head, _, le = name.partition(',le="')
        if "_bucket{" in head and le != '+Inf"}' and round(float(le.removesuffix('"}')) * unit) == bound:
            return value
    raise Violation(f"no bucket has the bound {bound}: {samples}")


def check_examples(version: Version, text: str, expected: list[tuple[int, bytes]], unit: int) -> None:
    """Each example stands behind the bucket in which its request is: the first one of each bucket does.

    Raises:
        Violation: one is missing, or at another place.
    """
    low, left = 0.0, [(ns, said.decode()) for ns, said in expected]
    for line in text.splitlines():
        head, _, le = line.partition(',le="')
        if "_bucket{" not in head:
            continue
        bound, _, rest = le.partition('"} ')
        high = float("inf") if bound == "+Inf" else round(float(bound) * unit)
        mine = [said for ns, said in left if low < ns <= high]
        _, mark, said = rest.partition(" # ")
        if mark + said != (mine[0] if mine else ""):
            raise Violation(f"{version.prefix}: {line!r} has another example than {mine[:1]}")
        low = high


def samples_of(text: bytes) -> Samples:
    """The samples of a family."""
    return {name: float(value) for name, _, value in map(_parted, text.decode().splitlines())}


def _parted(line: str) -> tuple[str, str, str]:
    """A sample without its example: its name, and its value."""
    return line.partition(" # ")[0].rpartition(" ")


def value_of(samples: Samples, suffix: str = "") -> float:
    """The sample whose name ends so, of a version without labels but its model's; 0: there is none."""
    return next((value for name, value in samples.items() if name.partition("{")[0].endswith(suffix)), 0)


def check_histogram(version: Version, name: str, samples: Samples) -> None:
    """Buckets are counted from the least bound on, and the last one has all."""
    buckets = [value for sample, value in samples.items() if "_bucket{" in sample]
    if buckets and (buckets != sorted(buckets) or buckets[-1] != value_of(samples, "_count")):
        raise Violation(f"{version.prefix}: {name} has buckets {samples}")


def list_regions(simulation: Simulation) -> None:
    """Read which regions there are.

    Raises:
        Violation: it is another one than clients have registered.
    """
    regions = simulation.regions
    clients = [each.region for each in simulation.clients if each.region and each.region.registered]
    listed = {kind: regions.entries(SHARED, kind) for kind in (SYSTEM, CUDA)}
    for kind, statuses in listed.items():
        expected = sorted((each.name, each.device) for each in clients if (each.device >= 0) == (kind == CUDA))
        told = [(status.name, status.device if kind == CUDA else -1) for status in statuses]
        if told != expected:
            raise Violation(f"regions {told}, where clients have {expected}")
    keys = {each.name: "/" + each.name if each.device < 0 else "" for each in clients}
    for name in ("nowhere", *keys):
        found = regions.find(SHARED, name)
        if (found is not None) != (name in keys) or (found is not None and found.key != keys[name]):
            raise Violation(f"region '{name}' is found as {found}")
    size = sum(status.byte_size for statuses in listed.values() for status in statuses)
    if regions.count < len(keys) or regions.byte_size < size:
        raise Violation(f"{regions.count} regions of {regions.byte_size} bytes, where clients have {sorted(keys)}")
