"""TensorFlow's SavedModels and GraphDefs, executed in worker processes that have TensorFlow; the server needs none."""

from inferd.backends.tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]
