"""Checks a configuration against the inputs and outputs in a model's file."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inferd.backends.api import BackendError, ModelSpec, TensorSpec


def check_names(spec: ModelSpec, kind: str, tensors: Sequence[TensorSpec], known: Collection[str]) -> None:
    """Check that the model has every configured tensor.

    Args:
        kind: "input" or "output".
        known: the names of the model's tensors of this kind.

    Raises:
        BackendError: the model lacks one.
    """
    for tensor in tensors:
        if tensor.name not in known:
            raise BackendError(
                f"unexpected inference {kind} '{tensor.name}' for model '{spec.name}', allowed {kind}s are: "
                f"{', '.join(known)}"
            )


def check_none_missing(spec: ModelSpec, inputs: Collection[str], missing: Sequence[str]) -> None:
    """Check that every input that the model requires is configured.

    Args:
        inputs: the names of the required inputs.
        missing: those of them that the configuration lacks.

    Raises:
        BackendError: an input is missing.
    """
    if missing:
        raise BackendError(
            f"unable to load model '{spec.name}', configuration expects {len(spec.model_inputs)} inputs, model "
            f"provides {len(inputs)}: add {', '.join(missing)}"
        )


def check_dims(
    spec: ModelSpec, tensor: TensorSpec, model: tuple[int, ...], *, any_batch: bool = False, any_dims: bool = False
) -> None:
    """Check a shape: dimensions that both sides fix are equal, and the model's batch dimension is variable.

    Args:
        model: the shape in the file, -1 for what it leaves open.
        any_batch: the backend reshapes the model to the configuration's batch dimension.
        any_dims: the backend reshapes the model to all other dimensions of the configuration.

    Raises:
        BackendError: the shapes differ; the text has both.
    """
    if not model and not spec.max_batch_size:
        return  # a scalar, or of unrecorded rank: the file does not distinguish them
    configured = (-1, *tensor.dims) if spec.max_batch_size else tensor.dims
    batched = " with the batch dimension that max_batch_size > 0 means" if spec.max_batch_size else ""
    if len(model) != len(configured):
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': the model expects {len(model)} dimensions "
            f"(shape {shown(model)}) but the model configuration specifies {len(configured)} dimensions "
            f"(shape {shown(configured)}{batched})"
        )
    if spec.max_batch_size and model[0] != -1 and not any_batch:
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': model does not support batching while non-zero "
            f"max_batch_size is specified: its first dimension is {model[0]}, not variable (shape {shown(model)})"
        )
    if not any_dims and any(-1 not in pair and pair[0] != pair[1] for pair in zip(model, configured, strict=True)):
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': the model expects shape {shown(model)} but the model "
            f"configuration specifies shape {shown(configured)}{batched}"
        )


def shown(dims: Sequence[int]) -> str:
    """A shape as errors write it."""
    return f"[{','.join(map(str, dims))}]"
