"""Model repositories for the benchmarks and the soak test, written as plain folders and config.pbtxt texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Identity:
    """A model of the identity backend: INPUTn comes back as OUTPUTn, every dimension variable."""

    name: str
    tensors: tuple[tuple[str, int], ...]  # datatype and rank (without the batch dimension) of each
    max_batch_size: int = 64  # 0: no batch dimension, no batching
    batching: str = "dynamic_batching { }"
    instances: int = 1
    parameters: dict[str, str] = field(default_factory=dict)

    def config(self) -> str:
        """The text of config.pbtxt."""
        lines = [f'name: "{self.name}"', 'backend: "identity"', f"max_batch_size: {self.max_batch_size}"]
        for i, (datatype, rank) in enumerate(self.tensors):
            data_type = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
            dims = ", ".join(["-1"] * rank)
            lines.append(f'input {{ name: "INPUT{i}" data_type: {data_type} dims: [ {dims} ] }}')
            lines.append(f'output {{ name: "OUTPUT{i}" data_type: {data_type} dims: [ {dims} ] }}')
        if self.max_batch_size and self.batching:
            lines.append(self.batching)
        lines.append(f"instance_group {{ count: {self.instances} kind: KIND_CPU }}")
        for key, value in self.parameters.items():
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
        return "\n".join(lines) + "\n"


def write(folder: Path, models: Iterable[Identity]) -> Path:
    """Write a repository of these models, each with an empty version 1; returns the folder."""
    for model in models:
        (folder / model.name / "1").mkdir(parents=True, exist_ok=True)
        (folder / model.name / "config.pbtxt").write_text(model.config())
    return folder


# Parameters of the identity backend. With `gather` it makes each batch's inputs contiguous and returns that memory as
# the outputs, which are split among the requests, as with a real model; without, each request gets its own input back.
GATHER = {"gather": "true"}
SLOW = {"delay_us": "2000"}

SOAK = (
    Identity("soak_fp32", (("FP32", 1),), instances=2, parameters=GATHER),
    Identity("soak_int64", (("INT64", 2),), parameters=GATHER),
    Identity(
        "soak_uint8",
        (("UINT8", 1),),
        batching="dynamic_batching { max_queue_delay_microseconds: 200 }",
        parameters=GATHER,
    ),
    Identity("soak_int16", (("INT16", 3),), batching="dynamic_batching { preferred_batch_size: [ 4, 8 ] }"),
    Identity("soak_fp16", (("FP16", 1),), parameters=GATHER),
    Identity("soak_bool", (("BOOL", 2),)),
    Identity("soak_bytes", (("BYTES", 1),), instances=2, parameters=GATHER),
    Identity("soak_pair", (("FP64", 1), ("BYTES", 1)), parameters=GATHER),
    Identity("soak_four", (("BF16", 1), ("UINT32", 2), ("INT8", 1), ("INT32", 1)), max_batch_size=8, parameters=GATHER),
    Identity("soak_single", (("UINT64", 2), ("UINT16", 1)), max_batch_size=0, parameters=GATHER),
    Identity("soak_alone", (("FP32", 2),), batching="", parameters=GATHER),
    Identity("soak_ordered", (("FP32", 1),), instances=2, batching="dynamic_batching { preserve_ordering: true }"),
    Identity(
        "soak_levels",
        (("INT32", 1),),
        batching="dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
        parameters=GATHER,
    ),
    Identity("soak_slow", (("FP32", 1),), instances=2, parameters=GATHER | SLOW),
)

# The models of the benchmark table. Requests to `large_in` and `large_read` have a large and a small tensor and request
# only the small output; `large_read` gathers the large one, too.
WINDOWS_US = (100, 300, 500, 1000, 5000)
BENCH = (
    Identity("identity", (("FP32", 1),), parameters=GATHER),
    Identity("shared", (("FP32", 1),)),
    Identity("large_in", (("FP32", 1), ("FP32", 1))),
    Identity("large_read", (("FP32", 1), ("FP32", 1)), parameters=GATHER),
    *(
        Identity(f"window_{us}", (("FP32", 1),), batching=f"dynamic_batching {{ max_queue_delay_microseconds: {us} }}")
        for us in WINDOWS_US
    ),
)
