"""Backends that were compiled for Triton's C API, each instance in a worker process that loads the library."""

from inferd.backends.triton_api.backend import TritonApiBackend

__all__ = ["TritonApiBackend"]
