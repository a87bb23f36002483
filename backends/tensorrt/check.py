"""Whether a configuration agrees with its plan."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.backends.api import BackendError, InstanceSpec, ModelSpec, TensorSpec
from inferd.backends.tensorrt.plan import Dims, Plan, PlanTensor


def check(spec: ModelSpec, plan: Plan) -> None:
    """Compare names, datatypes, shapes and shape tensors.

    Raises:
        BackendError: they differ; the text names the tensor, what the plan has and what the configuration says.
    """
    inputs = {tensor.name: tensor for tensor in plan.inputs}
    outputs = {tensor.name: tensor for tensor in plan.outputs}
    missing = inputs.keys() - {tensor.name for tensor in spec.model_inputs}
    if missing:
        raise BackendError(
            f"failed to load model '{spec.name}': configuration expects {len(spec.model_inputs)} inputs, the plan has "
            f"{len(inputs)}: add {', '.join(sorted(missing))}"
        )
    for kind, tensors, known in (("input", spec.model_inputs, inputs), ("output", spec.model_outputs, outputs)):
        for tensor in tensors:
            _check_tensor(spec, kind, tensor, known)
    for tensor in spec.inputs:
        if tensor.optional:
            raise BackendError(f"model '{spec.name}': a plan needs all its inputs, '{tensor.name}' cannot be optional")


def _check_tensor(spec: ModelSpec, kind: str, tensor: TensorSpec, known: Mapping[str, PlanTensor]) -> None:
    found = known.get(tensor.name)
    which = f"{kind} '{tensor.name}' for model '{spec.name}'"
    if found is None:
        raise BackendError(f"unexpected inference {which}, allowed {kind}s are: {', '.join(known)}")
    if found.datatype != tensor.datatype:
        raise BackendError(f"unexpected datatype TYPE_{tensor.datatype} for {which}, expecting TYPE_{found.datatype}")
    if found.is_shape and not tensor.shape_tensor:
        raise BackendError(
            f"{which} is a shape tensor but the model configuration doesn't mark it as a shape tensor: write "
            "is_shape_tensor: true"
        )
    if tensor.shape_tensor and not found.is_shape:
        raise BackendError(f"{which} is incorrectly marked as a shape tensor in the model configuration")
    configured = _as_in_plan(spec, tensor)
    if not _agree(found.dims, configured, batches=spec.max_batch_size > 0 and not tensor.shape_tensor):
        with_batch = ", with the batch that max_batch_size > 0 means" if _has_batch(spec, tensor) else ""
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': the plan has shape {list(found.dims)} but the model "
            f"configuration specifies {list(configured)}{with_batch}"
        )


def _as_in_plan(spec: ModelSpec, tensor: TensorSpec) -> Dims:
    if tensor.shape_tensor:
        return (tensor.dims[0] + (spec.max_batch_size > 0),)
    return (-1, *tensor.dims) if _has_batch(spec, tensor) else tensor.dims or (-1,)


def _has_batch(spec: ModelSpec, tensor: TensorSpec) -> bool:
    """Whether the batch adds to the configured dimensions; the rows of ragged tensors lie one after the other."""
    return spec.max_batch_size > 0 and not (tensor.ragged or tensor.like_input)


def _agree(plan: Dims, configured: Dims, *, batches: bool) -> bool:
    """Dimensions that both fix must be equal; a batch may be fixed at 1 row."""
    if not plan and configured == (1,):
        return True  # a scalar, which no configuration can describe
    if batches and plan[:1] == (1,):
        plan = (-1, *plan[1:])
    if batches and plan[:1] != (-1,):
        return False
    return len(plan) == len(configured) and all(
        -1 in (have, want) or have == want for have, want in zip(plan, configured, strict=True)
    )


def check_instance(spec: ModelSpec, plan: Plan, instance: InstanceSpec) -> None:
    """Compare the profiles that an instance may use, and the largest batch that they serve.

    Raises:
        BackendError: the plan has no such profile, or no profile for so large a batch.
    """
    for index in instance.profiles:
        if index >= len(plan.profiles):
            raise BackendError(
                f"instance '{instance.name}' of model '{spec.name}' is configured with profile {index}; the plan "
                f"has {len(plan.profiles)}: 0 to {len(plan.profiles) - 1}"
            )
    rows = max(plan.profiles[index].rows for index in instance.profiles or (0,))
    if rows < spec.max_batch_size and not any(tensor.ragged for tensor in spec.inputs):
        raise BackendError(
            f"unexpected configuration maximum batch size for '{spec.name}'. Expecting {rows} or less as the "
            f"profiles of instance '{instance.name}' allow, but got {spec.max_batch_size}"
        )
