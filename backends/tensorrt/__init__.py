"""Plans of TensorRT, through whichever of its Python packages is installed."""

from inferd.backends.tensorrt.backend import TensorRTBackend

__all__ = ["TensorRTBackend"]
