"""`inferd models`: the repository of a server, the properties of its models, their statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inferd.server.errors import Misused
from inferd.server.observe.escaping import visible
from inferd.server.tools.reach import Reach, failure
from inferd.server.tools.tables import table
from inferd_client.utils import InferenceServerException


def show_index(reach: Reach, as_json: bool) -> None:
    """Print the repository's models and their states."""
    with reach.client() as client:
        try:
            index = client.get_model_repository_index(headers=reach.metadata, client_timeout=reach.timeout)
        except InferenceServerException as error:
            raise failure(reach, error) from None
    models = sorted(index.models, key=_place)
    if as_json:
        found = [{"name": m.name, "version": m.version, "state": m.state, "reason": m.reason} for m in models]
        print(json.dumps(found, indent=2))
        return
    if not models:
        print(f"{reach.url} has no models")
        return
    print(table(("model", "version", "state", "reason"), ((m.name, m.version, m.state, m.reason) for m in models)))


def _place(model: Any) -> tuple[str, int, str]:
    """Where a version stands in a list: by name, then by number, which models that are not loaded may lack."""
    return model.name, int(model.version) if model.version.isdecimal() else 0, model.version


def load(reach: Reach, names: Sequence[str], config: Path | None) -> None:
    """Load or reload models.

    Args:
        config: a file to use in place of the model's config.pbtxt, in JSON or in protobuf's text format.
    """
    text = None
    if config is not None:
        if len(names) != 1:
            raise Misused(f"--model-config: expected one model, got {len(names)}")
        text = _config_json(config)
    with reach.client() as client:
        for name in names:
            try:
                client.load_model(name, headers=reach.metadata, config=text, client_timeout=reach.timeout)
            except InferenceServerException as error:
                raise failure(reach, error) from None
            print(f"{name} is loaded")


def _config_json(path: Path) -> str:
    from google.protobuf import json_format, text_format

    from inferd_client.pb import model_config_pb2 as pb

    try:
        text = path.read_text()
        if text.lstrip().startswith("{"):
            return text
        return json_format.MessageToJson(text_format.Parse(text, pb.ModelConfig()), preserving_proto_field_name=True)
    except (OSError, text_format.ParseError, ValueError) as error:
        raise Misused(f"--model-config: {path}: {error}") from None


def unload(reach: Reach, names: Sequence[str], dependents: bool) -> None:
    """Unload models and, with `dependents`, also the models that were loaded because of them."""
    with reach.client() as client:
        for name in names:
            try:
                client.unload_model(
                    name, headers=reach.metadata, unload_dependents=dependents, client_timeout=reach.timeout
                )
            except InferenceServerException as error:
                raise failure(reach, error) from None
            print(f"{name} is unloaded")


def describe(reach: Reach, name: str, version: str, pbtxt: bool, as_json: bool) -> None:
    """Print a model's inputs and outputs, or its whole configuration."""
    from google.protobuf import text_format

    with reach.client() as client:
        options: dict[str, Any] = {"headers": reach.metadata, "client_timeout": reach.timeout}
        try:
            config = client.get_model_config(name, version, **options).config
            if pbtxt:
                print(text_format.MessageToString(config, as_utf8=False), end="")
                return
            metadata = client.get_model_metadata(name, version, as_json=as_json, **options)
        except InferenceServerException as error:
            raise failure(reach, error) from None
    if as_json:
        print(json.dumps(metadata, indent=2))
        return
    batch = f"at most {config.max_batch_size} in a batch" if config.max_batch_size else "no batches"
    versions = ", ".join(_labelled(metadata.versions, config.parameters["version_labels"].string_value))
    print(visible(f"{metadata.name}: {metadata.platform or config.backend}, versions {versions}, {batch}"))
    if config.model_transaction_policy.decoupled:
        print("decoupled: any number of responses for each request, in a stream")
    rows = [("input", *_tensor(tensor)) for tensor in metadata.inputs]
    rows += [("output", *_tensor(tensor)) for tensor in metadata.outputs]
    print(table(("", "name", "datatype", "shape"), rows))


def _labelled(versions: Sequence[str], text: str) -> Iterator[str]:
    """Each version with its labels; the text is "LABEL=VERSION, ..."."""
    labels = [each.replace(" ", "").partition("=") for each in text.split(",")]
    for version in versions:
        own = [label for label, _, named in labels if named == version]
        yield f"{version} ({', '.join(own)})" if own else version


def _tensor(tensor: Any) -> tuple[str, str, str]:
    return tensor.name, tensor.datatype, str(list(tensor.shape))


def show_statistics(reach: Reach, name: str, as_json: bool) -> None:
    """Print the statistics of models since their loads."""
    with reach.client() as client:
        try:
            found = client.get_inference_statistics(
                name, headers=reach.metadata, as_json=as_json, client_timeout=reach.timeout
            )
        except InferenceServerException as error:
            raise failure(reach, error) from None
    if as_json:
        print(json.dumps(found, indent=2))
        return
    head = ("model", "version", "requests", "failed", "executions", "batch", "queue", "input", "compute", "output")
    print(table(head, _statistics(found.model_stats), "llrrrrrrrr"))
    print("times in microseconds: the mean of a request")


def _statistics(models: Sequence[Any]) -> Iterator[tuple[object, ...]]:
    for model in sorted(models, key=_place):
        stats = model.inference_stats
        times = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
        yield (
            model.name,
            model.version,
            stats.success.count,
            stats.fail.count,
            model.execution_count,
            f"{model.inference_count / model.execution_count:.1f}" if model.execution_count else "-",
            *(f"{part.ns / part.count / 1000:.0f}" if part.count else "-" for part in times),
        )
