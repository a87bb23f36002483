"""Reports each batch when it begins: in the records of its requests, and by an optional line in the log.

Instances read one flag for each batch, and enter Python only if it is set.
"""

import logging

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport strncpy

from inferd._native.atomic cimport fetch_add64, load32, store32
from inferd._native.request.record cimport NOTED_TEXT, Record
from inferd._native.request.signature cimport Signature

logger = logging.getLogger("inferd.batch")

cdef int32_t switched_on = 0
cdef int64_t batches = 0     # of requests with records, in the process; atomic
cdef const char *SCHEDULER = "as its scheduler decided"


def switch(on: bool) -> None:
    """Write a line at level DEBUG to the logger "inferd.batch" for each batch from now on, or stop doing so."""
    store32(&switched_on, 1 if on else 0)


cdef void batch_log(NativeBatch *batch, const char *instance, const char *why) noexcept nogil:
    batch.instance = instance
    batch.why = why if why != NULL else SCHEDULER
    if batch.recorded:
        note(batch)
    if load32(&switched_on) and batch.count:
        with gil:
            write(batch, instance, batch.why)


cdef void note(const NativeBatch *batch) noexcept nogil:
    # now, because a request that is answered before the batch ends takes its record with it
    cdef uint64_t number = <uint64_t>fetch_add64(&batches, 1) + 1
    cdef Record *record
    cdef uint32_t i
    for i in range(batch.count):
        record = <Record *>batch.requests[i].record
        if record == NULL:
            continue
        record.taken_ns = batch.taken_ns
        record.batch = number
        record.batch_rows = batch.rows
        record.batch_requests = batch.count
        record.why = batch.why
        strncpy(record.instance, batch.instance, NOTED_TEXT - 1)


cdef void write(const NativeBatch *batch, const char *instance, const char *why) noexcept:
    # begins with the words of Triton's line, for which operators search
    cdef const Signature *signature = batch.signature
    cdef int64_t oldest = batch.requests[0].queued_ns
    cdef uint32_t i
    for i in range(1, batch.count):
        oldest = min(oldest, batch.requests[i].queued_ns)
    logger.debug(
        "model %s, instance %s, executing %d requests: version %d, %d rows, the oldest waited %d us, %s",
        signature.name.data[:signature.name.size].decode("utf-8", "replace"), instance.decode(), batch.count,
        signature.version, batch.rows, (batch.taken_ns - oldest) // 1000, why.decode())
