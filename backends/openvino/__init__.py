"""Models on OpenVINO. The runtime is imported when the first model is inspected or loaded.

OpenVINO's import uses a telemetry package, which reports over the network and keeps an id of this machine in the home
folder. This package makes the telemetry package look missing, before anything can import OpenVINO.
"""

import sys

if "openvino" not in sys.modules:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

from inferd.backends.openvino.backend import OpenVinoBackend

__all__ = ["OpenVinoBackend"]
