"""Models on OpenVINO. The runtime is imported when the first model is inspected or loaded.

When it is imported it would tell its makers so over the network, and keep a name for this machine in the home folder. A
package of its own does that, which is made to look missing here, before anything can be imported.
"""

import sys

if "openvino" not in sys.modules:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

from backends.openvino.backend import OpenVinoBackend

__all__ = ["OpenVinoBackend"]
