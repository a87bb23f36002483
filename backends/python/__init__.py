"""The Python backend: models that are a `model.py`, each instance in a process of its own."""

from inferd.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
