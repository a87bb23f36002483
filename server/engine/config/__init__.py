"""config.pbtxt → the complete, valid configuration of each version and the frozen specification made of it.

`prepare` takes a model's folder through these steps:

    reading (files → messages, by `inferd.server.engine.pbtxt`; a version's own file over the model's; defaults of what
    was not written) → refused (what is not served) → completion (from the model file) → rules (what must hold)
    → specification

`compose` then completes ensembles by the models of their steps.
"""

from __future__ import annotations

from inferd.server.engine.config.alike import Alike
from inferd.server.engine.config.completion import complete
from inferd.server.engine.config.composition import compose, models_of
from inferd.server.engine.config.preparation import Each, Prepared, VersionConfig, one_by_one, prepare
from inferd.server.engine.config.reading import Options, Outline, outline
from inferd.server.engine.config.rules import validate
from inferd.server.engine.config.specification import to_spec
from inferd.server.engine.pbtxt.as_json import config_from_json, config_to_json

__all__ = [
    "Alike",
    "Each",
    "Options",
    "Outline",
    "Prepared",
    "VersionConfig",
    "complete",
    "compose",
    "config_from_json",
    "config_to_json",
    "models_of",
    "one_by_one",
    "outline",
    "prepare",
    "to_spec",
    "validate",
]
