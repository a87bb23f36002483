"""The command `inferd backends init`: makes a backend to begin with, and a repository with a model of it."""

from __future__ import annotations

import re
from pathlib import Path

from inferd.server.errors import AlreadyExists, Misused

NAME = re.compile(r"[a-z][a-z0-9_]*")

BACKEND = '''"""{name}: a backend to begin with. docs/backends.md, "Writing a backend", has the contract.

Its models join strings and scale numbers: "text" and "y" of each request. Replace what `load` and `execute` do.
"""

import numpy as np

from inferd.backends.api import Backend, BackendError, Batch, Instance, InstanceSpec, Model, ModelSource


class {title}Backend(Backend):
    name = "{name}"
    model_filename = "model.txt"  # in the folder of each version

    def load(self, source: ModelSource) -> Model:
        """Load one version; runs outside of the event loop, and may take long."""
        path = source.model_file(self.model_filename)
        try:
            factor = float(path.read_text())
        except OSError:
            raise source.not_found(path) from None
        except ValueError as error:
            raise BackendError(f"{{path}}: expected a number: {{error}}") from None
        return {title}Model(factor)


class {title}Model(Model):
    def __init__(self, factor: float) -> None:
        self.factor = np.float32(factor)

    def create_instance(self, spec: InstanceSpec) -> Instance:
        """Called once for each configured instance."""
        return {title}Instance(self.factor)


class {title}Instance(Instance):
    writes_inputs = False  # `execute` only reads them: no copies of memory that others see

    def __init__(self, factor: np.float32) -> None:
        self.factor = factor

    def execute(self, batch: Batch) -> None:
        """All requests of a batch at once: inputs have the shape (rows, *dims)."""
        words = batch.input("words")
        suffix = batch.input("suffix")  # optional: None where the requests of this batch leave it out
        if batch.wants("text"):
            ends = suffix.strings() if suffix is not None else [b""] * batch.rows
            # elements are bytes, in row-major order; here there is one in each row
            batch.set_bytes_output("text", [a + b for a, b in zip(words.strings(), ends)], [batch.rows, 1])
        if batch.wants("y"):
            batch.set_output("y", batch.input("x").numpy() * self.factor)
'''
CONFIG = """backend: "{name}"
max_batch_size: 8
input {{ name: "words" data_type: TYPE_STRING dims: [ 1 ] }}
input {{ name: "suffix" data_type: TYPE_STRING dims: [ 1 ] optional: true }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
dynamic_batching {{ }}
"""


def make_backend(name: str, folder: Path) -> int:
    """Write `<folder>/backends/<name>/__init__.py` and the model `<folder>/models/<name>_example`. Returns 0.

    Raises:
        Misused: the name cannot be that of a backend.
        AlreadyExists: such a backend or model exists.
    """
    if not NAME.fullmatch(name):
        raise Misused(f"backends init: expected a name of lower-case letters, digits and _, got {name!r}")
    backends, models = folder / "backends", folder / "models"
    code, version = backends / name / "__init__.py", models / f"{name}_example" / "1"
    for path in (code.parent, version.parent):
        if path.exists():
            raise AlreadyExists(f"{path} exists: give another name or --folder")
    title = "".join(part.capitalize() for part in name.split("_"))
    texts = {
        code: BACKEND.format(name=name, title=title),
        version.parent / "config.pbtxt": CONFIG.format(name=name),
        version / "model.txt": "2\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    print(f"check it:    inferd check-backend {models} --backend-directory {backends}")
    print(f"serve it:    inferd serve {models} --backend-directory {backends}")
    return 0
