"""Models on OpenVINO. The runtime is imported when the first model is inspected or loaded.

OpenVINO's import reports to its makers over the network, by a package of its own, and keeps a name for this machine in
the home folder. This package makes that one look missing, before anything can import OpenVINO.
"""

import sys

if "openvino" not in sys.modules:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

from backends.openvino.backend import OpenVinoBackend

__all__ = ["OpenVinoBackend"]
