"""The same module under the name of Triton's C half."""

import sys

import triton_python_backend_utils

sys.modules[__name__] = triton_python_backend_utils
