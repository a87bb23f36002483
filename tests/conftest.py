"""What holds for all tests."""

import os

from hypothesis import settings

# Servers of tests run beside each other: each serves its metrics on a port of its own.
os.environ.setdefault("INFERD_METRICS_PORT", "0")

# How long an example takes says how busy the machine is.
settings.register_profile("inferd", deadline=None)
settings.load_profile("inferd")
