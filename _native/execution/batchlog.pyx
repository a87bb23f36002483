"""The line per batch that can be switched on at run time: what went together, how long it had waited, and why it went.

Instances look at one flag per batch; only when it is set do they enter Python (see `_native.execution.instance`).
"""

from libc.stdint cimport int32_t

from _native.atomic cimport store32

cdef int32_t batch_log = 0


def switch(on: bool) -> None:
    """Write a line at level DEBUG to the logger "inferd.batch" for each batch from now on, or stop doing so."""
    store32(&batch_log, 1 if on else 0)
