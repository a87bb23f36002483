"""The same module under the name of its half in C, which Triton has."""

import sys

import triton_python_backend_utils

sys.modules[__name__] = triton_python_backend_utils
