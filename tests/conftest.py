"""What holds for all tests."""

import os

# Servers of tests run beside each other: each serves its metrics on a port of its own.
os.environ.setdefault("INFERD_METRICS_PORT", "0")
