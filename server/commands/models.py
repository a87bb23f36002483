"""The commands about the models of a server, and new ones.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

from pathlib import Path

from inferd.server.commands.connecting import HERE, Format, Server, Several, Switch
from inferd.server.errors import Misused


def ls(*, server: Server = HERE, format: Format = "table") -> int:  # noqa: A002 - the option's name
    """List the repository's models and their states.

    Args:
        format: Format of the output.
    """
    from inferd.server.tools.models import show_index

    show_index(server.reach(), format == "json")
    return 0


def load(*model: str, server: Server = HERE, model_config: Path | None = None) -> int:
    """Load or reload models, on a server with --model-control-mode=explicit.

    Args:
        model: Their names.
        model_config: A file in place of the model's config.pbtxt, in its format or in JSON.
    """
    from inferd.server.tools.models import load as load_models

    if not model:
        raise Misused("models load: name a model, or several")
    load_models(server.reach(), model, model_config)
    return 0


def unload(*model: str, server: Server = HERE, dependents: Switch = False) -> int:
    """Unload models, on a server with --model-control-mode=explicit.

    Args:
        model: Their names.
        dependents: Also unload the models of an ensemble's steps that were loaded with it.
    """
    from inferd.server.tools.models import unload as unload_models

    if not model:
        raise Misused("models unload: name a model, or several")
    unload_models(server.reach(), model, dependents)
    return 0


def describe(
    model: str,
    *,
    version: str = "",
    server: Server = HERE,
    pbtxt: Switch = False,
    format: Format = "table",  # noqa: A002
) -> int:
    """Show a model's inputs and outputs.

    Args:
        model: Its name.
        version: One of its versions; by default the server chooses.
        pbtxt: Print its whole configuration, as a config.pbtxt.
        format: Format of the output.
    """
    from inferd.server.tools.models import describe as describe_model

    describe_model(server.reach(), model, version, pbtxt, format == "json")
    return 0


def stats(model: str = "", *, server: Server = HERE, format: Format = "table") -> int:  # noqa: A002
    """Show the statistics of models since they were loaded.

    Args:
        model: One model; by default all.
        format: Format of the output.
    """
    from inferd.server.tools.models import show_statistics

    show_statistics(server.reach(), model, format == "json")
    return 0


def init(
    file: Path,
    *,
    repository: Path = Path("models"),
    name: str = "",
    max_batch_size: int | None = None,
    input: Several = (),  # noqa: A002 - the option's name
    backend_config: Several = (),
    force: Switch = False,
) -> int:
    """Make a model of a repository from a model file: its folder, and a config.pbtxt with remarks.

    Args:
        file: Of ONNX, TorchScript or another framework that is installed.
        repository: The folder of model folders.
        name: Of the model; by default the file's.
        max_batch_size: The largest batch; by default what the model file allows.
        input: NAME:DATATYPE:SIZE,SIZE of an input of a TorchScript file, with -1 for sizes that vary, and without the
            batch unless --max-batch-size is 0; by default they are guessed.
        backend_config: BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times.
        force: Overwrite an existing model.
    """
    from inferd.server.authoring import make_model

    return make_model(file, repository, name, max_batch_size, input, force=force, backend_config=backend_config)
