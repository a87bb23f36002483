"""Ensembles with their models: checks each edge, and derives properties of an ensemble from its steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from inferd._native.ensembles.plan import Analysis, PlanError
from inferd.backends.api import EnsembleSpec, ModelSpec, StepSpec, TensorSpec
from inferd.server.engine.config.ensemble import step_path
from inferd.server.engine.config.findings import Finding, error_of
from inferd.server.engine.config.preparation import Prepared
from inferd.server.engine.pbtxt.source import FieldPath
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb


def compose(prepared: Mapping[str, Prepared | None]) -> dict[str, Prepared | ConfigError]:
    """Complete each ensemble from the models of its steps; other models stay as they are.

    Args:
        prepared: all models by name; None for one with a bad configuration.

    Returns:
        All other models, and the error of each ensemble that does not fit its models.
    """
    found: dict[str, Prepared | ConfigError] = {}
    for name in prepared:
        _compose(name, prepared, found, ())
    return found


_NONE: frozenset[str] = frozenset()  # one cache for all models, of which there may be thousands


def models_of(spec: ModelSpec) -> frozenset[str]:
    """The models of an ensemble's steps; none for any other model."""
    return frozenset(step.model for step in spec.ensemble.steps) if spec.ensemble else _NONE


def _compose(
    name: str, prepared: Mapping[str, Prepared | None], found: dict[str, Prepared | ConfigError], above: tuple[str, ...]
) -> None:
    """Put the model into `found`; an ensemble comes behind the models of its steps."""
    one = prepared.get(name)
    if one is None or name in found:
        return
    if one.spec.ensemble is None:
        found[name] = one
        return
    if name in above:
        circle = " -> ".join((*above[above.index(name) :], name))
        found[name] = _error(
            one, [Finding(("ensemble_scheduling",), f"circular dependency between ensembles: {circle}")]
        )
        return
    for step in one.spec.ensemble.steps:
        _compose(step.model, prepared, found, (*above, name))
    if name not in found:
        found[name] = _composed(one, prepared, found)


def _error(one: Prepared, findings: Iterable[Finding]) -> ConfigError:
    return error_of(findings, one.spec.name, one.source)


def _composed(
    one: Prepared, known: Mapping[str, Prepared | None], models: Mapping[str, Prepared | ConfigError]
) -> Prepared | ConfigError:
    assert one.spec.ensemble is not None
    steps = one.spec.ensemble.steps
    if missing := list(_missing(one.spec.name, steps, known, models)):
        return _error(one, missing)
    specs = [model.of(step.version).spec for step in steps if isinstance(model := models[step.model], Prepared)]
    findings = [*_batch_sizes(one.spec, specs), *_Edges(one.spec, specs).findings()]
    if findings:
        return _error(one, findings)
    spec = replace(
        one.spec,
        ensemble=replace(one.spec.ensemble, steps=tuple(map(_completed, steps, specs))),
        outputs=tuple(_with_labels(output, steps, specs) for output in one.spec.outputs),
    )
    try:
        decoupled = len(Analysis(spec).scopes) > 1
    except PlanError as error:
        return _error(one, [Finding(step_path(error.step), f"in ensemble '{spec.name}', {error}", names_model=True)])
    if decoupled and (spec.caches or spec.coalesces):
        field = ("response_cache",) if spec.caches else ("parameters", "coalesce_requests")
        text = f"ensemble '{spec.name}' has a decoupled step: its responses are neither cached nor coalesced"
        return _error(one, [Finding(field, text, "remove it", names_model=True)])
    config = (
        pb.ModelConfig()
    )  # the present one may be that of the ensemble in service, which a failed load leaves as it is
    config.CopyFrom(one.config)
    config.model_transaction_policy.decoupled = decoupled
    completed = replace(one.of(), config=config, spec=replace(spec, decoupled=decoupled))
    return replace(one, by_version=dict.fromkeys(one.by_version, completed))


def _missing(
    name: str,
    steps: tuple[StepSpec, ...],
    known: Collection[str],
    models: Mapping[str, Prepared | ConfigError],
) -> Iterator[Finding]:
    """Findings about steps whose model or version does not exist."""
    for index, step in enumerate(steps):
        model = models.get(step.model)
        if step.model not in known:
            text = f"ensemble '{name}' contains models that are not available or ambiguous: {step.model}"
            yield Finding(step_path(index, "model_name"), text, names_model=True)
        elif not isinstance(model, Prepared):
            text = f"ensemble '{name}' depends on '{step.model}' which has no loaded version"
            yield Finding(step_path(index, "model_name"), text, "see its own error", names_model=True)
        elif step.version >= 0 and step.version not in model.by_version:
            text = f"ensemble '{name}' depends on '{step.model}' whose required version {step.version} is not loaded"
            instead = f"versions served: {', '.join(map(str, model.versions))}"
            yield Finding(step_path(index, "model_version"), text, instead, names_model=True)


def _batch_sizes(spec: ModelSpec, models: list[ModelSpec]) -> Iterator[Finding]:
    for index, model in enumerate(models):
        if 0 < model.max_batch_size < spec.max_batch_size:
            text = (
                f"ensemble {spec.name} allows maximum batch size {spec.max_batch_size}, but it contains model "
                f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
            )
            yield Finding(step_path(index, "model_name"), text, names_model=True)


def _completed(step: StepSpec, model: ModelSpec) -> StepSpec:
    """The step with the properties of its model."""
    optional = frozenset(tensor.name for tensor in model.inputs if tensor.optional)
    return replace(step, optional=optional, decoupled=model.decoupled)


def _with_labels(output: TensorSpec, steps: tuple[StepSpec, ...], models: list[ModelSpec]) -> TensorSpec:
    """The output with the labels of the step that writes it, unless it has its own."""
    if output.labels:
        return output
    for step, model in zip(steps, models, strict=True):
        for written in model.outputs:
            if step.outputs.get(written.name) == output.name and written.labels:
                return replace(output, labels=written.labels)
    return output


# ---- edges ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Node:
    """A tensor of the ensemble as one of its ends describes it."""

    model: str
    tensor: TensorSpec
    batches: bool

    @property
    def full(self) -> tuple[int, ...]:
        """The tensor's dims with the batch dimension."""
        return (-1, *self.tensor.dims) if self.batches else self.tensor.dims


def _compatible(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x == y or -1 in (x, y) for x, y in zip(a, b, strict=True))


def _shown(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"


class _Edges:
    """Follows the maps of all steps; the ensemble, or the first step that has a tensor, describes it first."""

    def __init__(self, spec: ModelSpec, models: list[ModelSpec]) -> None:
        assert spec.ensemble is not None
        self.name = spec.name
        self.ensemble: EnsembleSpec = spec.ensemble
        self.models = models
        self.nodes = {
            tensor.name: _Node(spec.name, tensor, spec.max_batch_size > 0) for tensor in (*spec.inputs, *spec.outputs)
        }

    def findings(self) -> Iterator[Finding]:
        for index, (step, model) in enumerate(zip(self.ensemble.steps, self.models, strict=True)):
            yield from self._inputs(index, step, model)
            yield from self._outputs(index, step, model)
        for index, step in enumerate(self.ensemble.steps):
            node = self.nodes.get(step.gate)
            if node is not None and node.tensor.datatype != "BOOL":
                text = f"the gate '{step.gate}' of step {index} must be TYPE_BOOL"
                yield Finding(step_path(index), text, f"model {node.model} has it as TYPE_{node.tensor.datatype}")

    def _inputs(self, index: int, step: StepSpec, model: ModelSpec) -> Iterator[Finding]:
        path = step_path(index, "input_map")
        yield from self._edges(path, step.inputs, model, model.inputs, "mapping to non-existing input")
        for tensor in model.inputs:
            if tensor.name not in step.inputs and not tensor.optional:
                text = f"input {tensor.name} in model {model.name} is not mapped to any ensemble tensors"
                yield self._finding(path, text)

    def _outputs(self, index: int, step: StepSpec, model: ModelSpec) -> Iterator[Finding]:
        path = step_path(index, "output_map")
        yield from self._edges(path, step.outputs, model, model.outputs, "mapped from non-existing output")

    def _edges(
        self, path: FieldPath, edges: Mapping[str, str], model: ModelSpec, tensors: Iterable[TensorSpec], unknown: str
    ) -> Iterator[Finding]:
        """Check that each entry of a map names one of the model's tensors and agrees with it."""
        known = {tensor.name: tensor for tensor in tensors}
        for name, tensor in edges.items():
            if name in known:
                yield from self._agree((*path, name), tensor, _Node(model.name, known[name], model.max_batch_size > 0))
            else:
                text = f"ensemble tensor {tensor} is {unknown} {name} in model {model.name}"
                yield self._finding((*path, name), text, f"its {unknown.split()[-1]}s: {', '.join(known)}")

    def _agree(self, path: FieldPath, name: str, node: _Node) -> Iterator[Finding]:
        """Check that datatype and shape at this end of the edge are those of the tensor."""
        first = self.nodes.setdefault(name, node)
        what = f"ensemble tensor {name}: inconsistent"
        if first.tensor.datatype != node.tensor.datatype:
            yield self._finding(
                path,
                f"{what} data type: TYPE_{first.tensor.datatype} is inferred from model {first.model} while "
                f"TYPE_{node.tensor.datatype} is inferred from model {node.model}",
            )
        # A model without a batch dimension may have it as its first one.
        if not _compatible(first.tensor.dims, node.tensor.dims) and not _compatible(first.full, node.full):
            yield self._finding(
                path,
                f"{what} shape: {_shown(first.full)} is inferred from model {first.model} while "
                f"{_shown(node.full)} is inferred from model {node.model}",
            )

    def _finding(self, path: FieldPath, text: str, instead: str = "") -> Finding:
        return Finding(path, f"in ensemble {self.name}, {text}", instead, names_model=True)
