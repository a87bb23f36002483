"""Ensembles without their models: the rules of `ensemble_scheduling` and of its parameters.

`inferd.server.engine.config.composition` has the rules that need the models of the steps.

A parameter `gate[STEP]`, for which the format has no field, makes a step conditional: it runs if this BOOL tensor of
the ensemble is true; "!name": if it is false. STEP is the step's number, from 0, or the name of its model if no other
step has that model. The parameters `queue_policy.*` apply to all requests in the ensemble.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from inferd.backends.api import EnsembleSpec, StepSpec
from inferd.server.engine.config.completion import ENSEMBLE
from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import of_backend
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd_client.pb import model_config_pb2 as pb

log = logging.getLogger("inferd.config")

MAX_STEPS = 1024

GATE = re.compile(r"gate\[(.*)\]")
TIMEOUT_ACTION = "queue_policy.timeout_action"


def step_path(index: int, *rest: str | int) -> FieldPath:
    """The path of a step, or of something in it."""
    return ("ensemble_scheduling", "step", index, *rest)


@dataclass(frozen=True, slots=True)
class Gate:
    """The tensor that decides whether a step runs, and the parameter that names it."""

    parameter: str
    tensor: str
    inverted: bool


def is_ensemble(config: pb.ModelConfig) -> bool:
    """Whether the configuration is that of an ensemble, well written or not."""
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def ensemble_spec(config: pb.ModelConfig) -> EnsembleSpec | None:
    """The steps of a valid configuration; `compose` adds the properties of their models."""
    if not is_ensemble(config):
        return None
    gates = _gates(config)
    steps = tuple(_step_spec(step, gates.get(index)) for index, step in enumerate(config.ensemble_scheduling.step))
    return EnsembleSpec(steps, max_inflight=config.ensemble_scheduling.max_inflight_requests)


def _step_spec(step: pb.ModelEnsembling.Step, gate: Gate | None) -> StepSpec:
    return StepSpec(
        model=step.model_name,
        version=step.model_version or -1,
        inputs=MappingProxyType(dict(step.input_map)),
        outputs=MappingProxyType(dict(step.output_map)),
        gate=gate.tensor if gate else "",
        gate_inverted=gate.inverted if gate else False,
    )


# ---- rules ----------------------------------------------------------------------------------------------------------


def ensemble_rules(config: pb.ModelConfig) -> Iterator[Finding]:
    """Findings about an ensemble, with Triton's texts if it has the rule."""
    if not is_ensemble(config):
        return
    if config.platform != ENSEMBLE:
        text = f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not {ENSEMBLE}"
        yield Finding(("ensemble_scheduling",), text, 'write platform: "ensemble" and no backend', names_model=True)
        return
    for name, field in (("instance group", "instance_group"), ("optimization", "optimization")):
        if config.instance_group if field == "instance_group" else config.HasField("optimization"):
            text = f"{name} should not be specified for ensemble '{config.name}'"
            yield Finding((field,), text, "write it for the models of the steps", names_model=True)
    yield from _parameters(config)
    wrong = list(_steps(config))
    yield from wrong
    if not wrong:
        yield from _Graph(config).findings()


def _steps(config: pb.ModelConfig) -> Iterator[Finding]:
    steps = config.ensemble_scheduling.step
    if not steps:
        text = f"must specify 'step' for ensemble '{config.name}'"
        yield Finding(("ensemble_scheduling",), text, names_model=True)
    if len(steps) > MAX_STEPS:
        yield Finding(("ensemble_scheduling",), f"at most {MAX_STEPS} steps are served, got {len(steps)},")
    for index, step in enumerate(steps[:MAX_STEPS]):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                text = f"must specify '{field}' in step {index} of ensemble '{config.name}'"
                yield Finding(step_path(index), text, names_model=True)
        if step.model_version < -1:
            text = f"the model_version of step {index} must be a version, or -1 for the latest"
            yield Finding(step_path(index, "model_version"), text, f"got {step.model_version}")
        if step.model_name == config.name:
            text = f"step {index} of ensemble '{config.name}' is the ensemble itself"
            yield Finding(step_path(index, "model_name"), text, names_model=True)


def _parameters(config: pb.ModelConfig) -> Iterator[Finding]:
    found: dict[int, str] = {}
    for key, value in sorted(config.parameters.items()):
        path: FieldPath = ("parameters", key)
        text = value.string_value
        if key == TIMEOUT_ACTION and text == "DELAY":
            yield Finding(path, f"parameter '{key}' cannot be DELAY: there is no queue in an ensemble", "write REJECT")
        if not (gate := GATE.fullmatch(key)):
            continue
        try:
            step = _step_number(config, gate[1])
        except ValueError as error:
            yield Finding(path, f"parameter '{key}' names no step: {error}")
            continue
        if step in found:
            yield Finding(path, f"parameter '{key}' names the same step as '{found[step]}'", "remove one of them")
        found[step] = key
        if not text.removeprefix("!"):
            yield Finding(path, f"parameter '{key}' must name a tensor of the ensemble")


def warn_parameters(config: pb.ModelConfig, source: Source) -> None:
    """Log a line for each parameter of an ensemble that nothing reads."""
    for key in sorted(of_backend(config)):
        if not GATE.fullmatch(key):
            where = source.at("parameters", key)
            log.warning("%s: parameter '%s' of ensemble '%s' has no effect", where, key, config.name)


def _step_number(config: pb.ModelConfig, name: str) -> int:
    """The number of the step that `name` means.

    Raises:
        ValueError: none, or more than one.
    """
    steps = config.ensemble_scheduling.step
    if name.isascii() and name.isdecimal():
        if int(name) >= len(steps):
            raise ValueError(f"there are {len(steps)} steps, counted from 0")
        return int(name)
    found = [index for index, step in enumerate(steps) if step.model_name == name]
    if not found:
        raise ValueError(f"no step has the model '{name}'")
    if len(found) > 1:
        raise ValueError(f"steps {', '.join(map(str, found))} have the model '{name}': write one of these numbers")
    return found[0]


def _gates(config: pb.ModelConfig) -> Mapping[int, Gate]:
    """The gates by step; malformed ones are left out."""
    gates = {}
    for key, value in config.parameters.items():
        if gate := GATE.fullmatch(key):
            try:
                step = _step_number(config, gate[1])
            except ValueError:
                continue
            tensor = value.string_value
            gates[step] = Gate(key, tensor.removeprefix("!"), tensor.startswith("!"))
    return gates


# ---- the graph ------------------------------------------------------------------------------------------------------


class _Graph:
    """Tensors and the steps between them, by name, before any model is known."""

    def __init__(self, config: pb.ModelConfig) -> None:
        self.config = config
        self.steps = config.ensemble_scheduling.step
        self.gates = _gates(config)
        self.inputs = [tensor.name for tensor in config.input]
        self.outputs = [tensor.name for tensor in config.output]
        self.read = [set(step.input_map.values()) for step in self.steps]
        for index, gate in self.gates.items():
            self.read[index].add(gate.tensor)
        self.writers: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            for tensor in step.output_map.values():
                self.writers.setdefault(tensor, []).append(index)
        self.known = self._reachable()

    def findings(self) -> Iterator[Finding]:
        yield from self._written_twice()
        yield from self._inputs()
        yield from self._outputs()
        yield from self._inner()

    def _reachable(self) -> set[str]:
        """Tensors that come with the request, or from steps whose inputs are all reachable."""
        known = set(self.inputs)
        waiting = set(range(len(self.steps)))
        while ready := {index for index in waiting if self.read[index] <= known}:
            waiting -= ready
            for index in ready:
                known.update(self.steps[index].output_map.values())
        return known

    def _exclude_each_other(self, writers: Iterable[int]) -> bool:
        """Whether at most one of these steps runs: two with the same gate, one of them inverted."""
        one, *others = [self.gates.get(index) for index in writers]
        other = others[0] if len(others) == 1 else None
        return bool(one and other and one.tensor == other.tensor and one.inverted != other.inverted)

    def _written_twice(self) -> Iterator[Finding]:
        for index, step in enumerate(self.steps):
            here = Counter(step.output_map.values())
            for name, tensor in sorted(step.output_map.items()):
                path = step_path(index, "output_map", name)
                writers = self.writers[tensor]
                if tensor in self.inputs:
                    text = f"ensemble tensor '{tensor}' is an input of ensemble '{self.config.name}'"
                    yield Finding(path, f"{text} and cannot be written by step {index}", names_model=True)
                elif here[tensor] > 1 or (index != writers[0] and not self._exclude_each_other(writers)):
                    text = f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble "
                    instead = f"step {writers[0]} writes it too; give the two opposite gates, or other names"
                    yield Finding(path, f"{text}'{self.config.name}' step {index}", instead, names_model=True)

    def _inputs(self) -> Iterator[Finding]:
        used = set().union(*self.read)
        for index, name in enumerate(self.inputs):
            if name not in used:
                text = f"ensemble input '{name}' for ensemble {self.config.name} is not used"
                yield Finding(("input", index, "name"), text, names_model=True)

    def _outputs(self) -> Iterator[Finding]:
        for index, name in enumerate(self.outputs):
            if name in self.known:
                continue
            path: FieldPath = ("output", index, "name")
            if name not in self.writers and not any(name in read for read in self.read):
                text = f"ensemble output '{name}' for ensemble {self.config.name} is not used"
                yield Finding(path, text, "no step writes it", names_model=True)
                continue
            text = f"output '{name}' for ensemble '{self.config.name}' is not written"
            if (source := self._unconnected(name)) != name:
                text += f": at least one of its depending tensors, '{source}', is not connected"
            yield Finding(path, text, names_model=True)

    def _unconnected(self, name: str) -> str:
        """The tensor where the way back from an unreachable tensor ends: one that nothing writes, or one of a
        circle."""
        seen = [name]
        while writers := self.writers.get(seen[-1]):
            before = [tensor for index in writers for tensor in sorted(self.read[index] - self.known)]
            unseen = [tensor for tensor in before if tensor not in seen]
            if not unseen:
                break
            seen.append(unseen[0])
        return seen[-1]

    def _inner(self) -> Iterator[Finding]:
        """Check that each tensor between steps is written and read."""
        text = "ensemble tensor '{}' is unused in ensemble '{}'"
        used = set().union(*self.read, self.outputs)
        for index, step in enumerate(self.steps):
            for name, tensor in sorted(step.output_map.items()):
                if tensor not in used:
                    path = step_path(index, "output_map", name)
                    instead = "no step reads it and it is no output of the ensemble"
                    yield Finding(path, text.format(tensor, self.config.name), instead, names_model=True)
            for name, tensor in sorted(step.input_map.items()):
                if tensor not in self.known and tensor not in self.writers:
                    path = step_path(index, "input_map", name)
                    instead = "no step writes it and it is no input of the ensemble"
                    yield Finding(path, text.format(tensor, self.config.name), instead, names_model=True)
            gate = self.gates.get(index)
            if gate and gate.tensor not in self.known and gate.tensor not in self.writers:
                instead = "no step writes it and it is no input of the ensemble"
                yield Finding(("parameters", gate.parameter), f"the gate '{gate.tensor}' does not exist", instead)
