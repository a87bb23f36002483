"""The models of the suite: the fake engine serves these specs, and `write_repository` lays them out for a real server.

All of them give back their inputs, the n-th input as the n-th output.
"""

from __future__ import annotations

from pathlib import Path

from inferd.backends.api import BatchingSpec, InstanceSpec, ModelSpec, TensorSpec

DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64",
    "BYTES",
)  # fmt: skip

LABELS = ("cat", "dog", "eel", "fox")

SLOW_US = 300_000
HANG_US = 6_000_000


def _model(name, inputs, *, max_batch_size=8, labels=(), delay_us=0):
    outputs = tuple(
        TensorSpec(each.name.replace("INPUT", "OUTPUT"), each.datatype, each.dims, labels=labels) for each in inputs
    )
    return ModelSpec(
        name=name,
        backend="identity",
        max_batch_size=max_batch_size,
        inputs=inputs,
        outputs=outputs,
        batching=BatchingSpec() if max_batch_size else None,
        instances=(InstanceSpec(f"{name}_0"),),
        parameters={"delay_us": str(delay_us)} if delay_us else {},
    )


def _tensors(*specs):
    return tuple(TensorSpec(*spec) for spec in specs)


MODELS = {
    model.name: model
    for model in (
        _model("simple", _tensors(("INPUT0", "FP32", (-1,)))),
        _model("pair", _tensors(("INPUT0", "FP32", (4,)), ("INPUT1", "INT32", (2, 2)))),
        _model("strings", _tensors(("INPUT0", "BYTES", (-1,)))),
        _model("whole", _tensors(("INPUT0", "FP32", (2, -1))), max_batch_size=0),
        _model("optional", _tensors(("INPUT0", "FP32", (4,)), ("INPUT1", "FP32", (4,), True))),
        _model("scores", _tensors(("INPUT0", "FP32", (4,))), labels=LABELS),
        _model("versions", _tensors(("INPUT0", "FP32", (4,)))),
        _model("slow", _tensors(("INPUT0", "FP32", (1,))), delay_us=SLOW_US),
        _model("hang", _tensors(("INPUT0", "FP32", (1,))), delay_us=HANG_US),
        *(
            _model(f"type_{datatype.lower()}", _tensors(("INPUT0", datatype, (-1,))), max_batch_size=0)
            for datatype in DATATYPES
        ),
    )
}

VERSIONS = {"versions": (1, 3)}
"""Versions of the models that have others than version 1."""

BROKEN = "broken"
"""A model that is in the repository and does not load."""


def versions(name: str) -> tuple[int, ...]:
    return VERSIONS.get(name, (1,))


def write_repository(root: Path, *, broken: bool = False) -> None:
    """Write all models into the folder `root` as a Triton model repository; with `broken`, also the broken one."""
    for spec in MODELS.values():
        folder = root / spec.name
        for version in versions(spec.name):
            (folder / str(version)).mkdir(parents=True)
        (folder / "config.pbtxt").write_text(_config(spec))
        if any(output.labels for output in spec.outputs):
            (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    if not broken:
        return
    (root / BROKEN / "1").mkdir(parents=True)
    (root / BROKEN / "config.pbtxt").write_text(f'name: "{BROKEN}"\nbackend: "no_such_backend"\n')


def _config(spec: ModelSpec) -> str:
    lines = [f'name: "{spec.name}"', f'backend: "{spec.backend}"', f"max_batch_size: {spec.max_batch_size}"]
    lines += [_tensor("input", tensor) for tensor in spec.inputs]
    lines += [_tensor("output", tensor) for tensor in spec.outputs]
    lines.append("instance_group { count: 1 kind: KIND_CPU }")
    if spec.batching is not None:
        lines.append("dynamic_batching { }")
    if len(versions(spec.name)) > 1:
        lines.append("version_policy { all { } }")
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in spec.parameters.items()
    ]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: TensorSpec) -> str:
    datatype = {"BYTES": "STRING"}.get(tensor.datatype, tensor.datatype)
    fields = [f'name: "{tensor.name}"', f"data_type: TYPE_{datatype}", f"dims: {list(tensor.dims)}"]
    if tensor.optional:
        fields.append("optional: true")
    if tensor.labels:
        fields.append('label_filename: "labels.txt"')
    return f"{kind} {{ {' '.join(fields)} }}"
