"""Model configurations: lookups, and completion by `auto_complete_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The input of this name; None if there is none."""
    return _named(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The output of this name; None if there is none."""
    return _named(model_config, "output", name)


def _named(model_config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    for properties in model_config.get(kind, ()):
        if properties["name"] == name:
            return properties  # type: ignore[no-any-return]
    return None


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the model may answer a request with any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


class ModelConfig:
    """The configuration that `auto_complete_config` receives and returns.

    Args:
        model_config: JSON text, or the configuration itself.
    """

    def __init__(self, model_config: str | Mapping[str, Any]) -> None:
        self._model_config: dict[str, Any] = (
            json.loads(model_config) if isinstance(model_config, str) else dict(model_config)
        )

    def as_dict(self) -> dict[str, Any]:
        """The configuration."""
        return self._model_config

    def _where(self) -> str:
        return f"in auto-complete-config function for model '{self._model_config.get('name', '')}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch.

        Raises:
            ValueError: the configuration has a larger one.
        """
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {self._where()} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Batch dynamically, with the defaults where the configuration does not set them.

        Raises:
            ValueError: the configuration has another scheduler.
        """
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._model_config.get('name', '')}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002 (its name in Triton)
        """Add an input, or complete the one of the same name.

        Args:
            input: `name`, `data_type`, `dims`, and `optional` if it is.

        Raises:
            ValueError: a property is missing or unknown, or contradicts the configuration.
        """
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete the one of the same name.

        Args:
            output: `name`, `data_type` and `dims`.

        Raises:
            ValueError: a property is missing or unknown, or contradicts the configuration.
        """
        self._add("output", output, ("name", "data_type", "dims"))

    def _add(self, kind: str, tensor: dict[str, Any], known: tuple[str, ...]) -> None:
        self._check_properties(kind, tensor, known)
        tensors = self._model_config.setdefault(kind, [])
        for current in tensors:
            if current["name"] == tensor["name"]:
                self._check_same(kind, current, tensor)
                current.update(tensor)
                return
        tensors.append(tensor)

    def _check_properties(self, kind: str, tensor: dict[str, Any], known: tuple[str, ...]) -> None:
        name = tensor.get("name", "")
        if any(key not in known for key in tensor):
            listed = ", ".join(f"'{key}'" for key in known[:-1]) + f" and '{known[-1]}'"
            raise ValueError(f"{kind} '{name}' {self._where()} contains property other than {listed}.")
        if "name" not in tensor:
            raise ValueError(f"{kind} {self._where()} is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{name}' {self._where()} is missing '{key}' property.")

    def _check_same(self, kind: str, current: dict[str, Any], tensor: dict[str, Any]) -> None:
        model, name = self._model_config.get("name", ""), tensor["name"]
        datatype = current.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {datatype} for {kind} '{name}', "
                f"model provides {tensor['data_type']}"
            )
        if current.get("dims") and [int(dim) for dim in current["dims"]] != [int(dim) for dim in tensor["dims"]]:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects dims {tensor['dims']} but the model "
                f"configuration specifies dims {current['dims']}"
            )
        if "optional" in current and "optional" in tensor and current["optional"] != tensor["optional"]:
            raise ValueError(
                f"model '{model}', tensor '{name}': the model expects optional {tensor['optional']} but the model "
                f"configuration specifies optional {current['optional']}"
            )

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model answers a request with any number of responses: `{"decoupled": True}`.

        Raises:
            ValueError: there is another property, or the configuration says otherwise.
        """
        model = self._model_config.get("name", "")
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{model}' contains property "
                "other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{model}', which is "
                    f"already set to '{policy['decoupled']}'."
                )
            policy["decoupled"] = wanted
