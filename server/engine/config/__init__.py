"""config.pbtxt → the complete, valid configuration of each version and the frozen specification made of it.

`prepare` takes a model's folder through all steps, each of which is a module of this package:

    reading (files → messages, by `inferd.server.engine.pbtxt`) → overlay (a version's over the model's)
    → defaults (what was not written) → refused (what is not served) → completion (from the model file) → rules (what
    must hold) → specification

`compose` then completes ensembles by the models of their steps.
"""

from __future__ import annotations

from inferd.server.engine.config.alike import Alike
from inferd.server.engine.config.as_json import config_from_json, config_to_json
from inferd.server.engine.config.completion import complete
from inferd.server.engine.config.composition import compose, models_of
from inferd.server.engine.config.options import Options
from inferd.server.engine.config.outline import Outline, outline
from inferd.server.engine.config.preparation import Each, one_by_one, prepare
from inferd.server.engine.config.prepared import Prepared, VersionConfig
from inferd.server.engine.config.rules import validate
from inferd.server.engine.config.specification import to_spec

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
