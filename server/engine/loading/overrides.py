"""The overrides of a load request, which replace the repository's contents: a configuration, and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType

from inferd.backends.temporary import TemporaryFolder
from inferd.server.engine.config import config_from_json
from inferd.server.engine.repository.folders import ModelFolder, versions_of
from inferd.server.errors import LACKS, Exhausted, Internal, InvalidArgument, ServerError, system_says
from inferd_client.pb import model_config_pb2 as pb

FILE = "file:"
"""The prefix of a load parameter with a file; the file's path in the model's folder follows."""


@dataclass(frozen=True, slots=True)
class Override:
    """The content of a load request.

    Attributes:
        config: replaces the configuration in the model's folder.
        files: by path, in a folder that replaces the model's; without any, the model's own folder is used.
    """

    config: pb.ModelConfig | None = None
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))


NOTHING = Override()


MOST = 4 << 20
"""The most characters of a configuration."""

POLLED = "failed to load '{}', failed to poll from model repository: "
"""The beginning of errors about overrides; Triton's end here, without the reason."""


def read_override(name: str, config: str, files: Mapping[str, bytes]) -> Override:
    """Parse the parameters of a load.

    Args:
        name: of the model.
        config: a configuration as JSON text; empty for none.
        files: contents by "file:" and a path in the model's folder.

    Raises:
        InvalidArgument: a parameter is malformed; the texts are Triton's.
    """
    parsed = None
    if len(config) > MOST:
        raise InvalidArgument(f"{POLLED.format(name)}Invalid config override: it has more than {MOST} characters")
    if config:
        try:
            parsed = config_from_json(config)
        except ValueError as error:
            raise InvalidArgument(f"{POLLED.format(name)}Invalid config override: {error}") from error
    paths = {}
    for key, content in files.items():
        if not key.startswith(FILE):
            raise InvalidArgument(f"unrecognized load parameter '{key}'. expected a name such as file:1/model.onnx")
        paths[_inside(key)] = content
    if paths and parsed is None:
        raise InvalidArgument("Load parameter 'config' must be specified for model file override")
    return Override(parsed, paths)


def _inside(name: str) -> str:
    path = PurePosixPath(name.removeprefix(FILE))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise InvalidArgument(
            f"Invalid file parameter '{name}' with normalized path '{path}' must stay within model directory."
        )
    return str(path)


def write_files(name: str, files: Mapping[str, bytes]) -> tuple[ModelFolder, TemporaryFolder]:
    """Make a model's folder with these files alone. Blocks.

    Returns:
        The folder, and the object that removes it, to be called when no version is served from it any more.

    Raises:
        InvalidArgument: a path leads through another file.
        Exhausted: the server has no descriptor or no memory for them.
        Internal: the files cannot be written.
    """
    try:
        holder = TemporaryFolder("load")
    except OSError as error:
        raise _unwritten(name, error) from error
    folder = holder.path / name
    try:
        folder.mkdir()
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return ModelFolder(name, folder, folder.parent, versions_of(folder)), holder
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        holder.cleanup()
        raise InvalidArgument(f"Invalid file parameter '{FILE}{path}', directory has been created as a file") from error
    except OSError as error:
        holder.cleanup()
        raise _unwritten(name, error) from error


def _unwritten(name: str, error: OSError) -> ServerError:
    text = f"{POLLED.format(name)}its files cannot be written: {system_says(error)}"
    return Exhausted(text) if error.errno in LACKS else Internal(text)
