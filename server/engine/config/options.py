"""How configurations are read."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.server.engine.config.completion import DEFAULT_MAX_BATCH_SIZE
from inferd.server.engine.pbtxt.parse import NO_VARIABLES
from inferd.server.engine.pbtxt.variables import Variables


@dataclass(frozen=True, slots=True)
class Options:
    """How configurations are read."""

    auto_complete: bool = True
    config_name: str = ""  # prefer configs/<config_name>.pbtxt
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    gpus: int = 0  # how many there are
    variables: Variables = NO_VARIABLES  # environment variables that configurations may use
