"""The same module under the name of its half in C, which Triton has."""

import sys

import triton_python_backend_utils  # type: ignore[import-not-found]

sys.modules[__name__] = triton_python_backend_utils
