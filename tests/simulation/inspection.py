"""An operator reads while requests go on: the metrics of a version as text, and the regions that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferd._native.memory.shm import CUDA, SHARED, SYSTEM
from inferd._native.service.exposition import KINDS, ModelMetrics
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.models import Version
    from tests.simulation.simulation import Simulation

MS = 1_000_000
BOUNDS = (MS // 10, MS // 2, MS, 5 * MS, 50 * MS, 1000 * MS)
Samples = dict[str, float]  # by what stands in front of the value


def read_metrics(version: Version) -> None:
    """Read all that there is to one version.

    Raises:
        Violation: figures do not agree with each other, or with what was told before.
    """
    kind = version.kind
    metrics = ModelMetrics(
        [(version.loaded.lane, b'model="m",version="1"', not kind.steps, kind.caches, kind.decoupled)]
    )
    metrics.read()
    found = {name: samples_of(metrics.render(name, name.encode(), 1, BOUNDS, name < "m")) for name in sorted(KINDS)}
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
        counts = version.backend.executions.count
        most = sum(times for (name, _), times in counts.items() if name == kind.name)
    agrees = value_of(told, "_count") == batches and batches <= most and rows <= value_of(told, "_sum")
    # there may be no memory to count a batch of a new size
    if not (agrees or version.backend.executions.is_faulty):
        raise Violation(f"{version.prefix}: {rows} rows in {batches} batches: {told}")
    before, version.told = version.told, {name: value for each in found.values() for name, value in each.items()}
    for name, value in before.items():
        if not name.startswith("pending") and version.told.get(name, 0) < value:
            raise Violation(f"{version.prefix}: {name} was {value}, and is {version.told.get(name)}")


def samples_of(text: bytes) -> Samples:
    """The samples of a family."""
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text.decode().splitlines())}


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
