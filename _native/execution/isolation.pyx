"""Executes the requests of a failed batch again, one at a time."""

from libc.stdint cimport uint32_t
from libc.stdlib cimport free

from inferd._native.execution.batch cimport NativeBatch, batch_give_inputs, execute_fn
from inferd._native.execution.gather cimport batch_is_copied
from inferd._native.request.request cimport Request, request_fail
from inferd._native.status cimport STATUS_INTERNAL, STATUS_INVALID_ARGUMENT


cdef bint may_execute_each(const NativeBatch *batch) noexcept nogil:
    return (batch.count > 1 and not batch.requests[0].is_warmup
            and (not batch.writes_inputs or batch_is_copied(batch)))


cdef void execute_each(NativeBatch *batch, execute_fn execute, void *context) noexcept nogil:
    cdef Request **requests = batch.requests
    cdef uint32_t count = batch.count
    cdef uint32_t rows = batch.rows
    cdef uint32_t i
    batch.count = 1
    for i in range(count):
        batch.requests = requests + i
        batch.rows = requests[i].rows
        forgive(batch)
        batch_give_inputs(batch)
        execute(batch, context)
        if batch.failed:
            request_fail(requests[i], STATUS_INVALID_ARGUMENT if batch.blamed else STATUS_INTERNAL, batch.details)
            batch.details = NULL
    forgive(batch)
    batch.requests = requests
    batch.count = count
    batch.rows = rows


cdef void forgive(NativeBatch *batch) noexcept nogil:
    batch.failed = batch.blamed = False
    free(batch.details)
    batch.details = NULL
