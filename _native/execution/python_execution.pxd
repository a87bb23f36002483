# Executions of instances in Python: whole, or begun and ended.

from cpython.object cimport PyObject

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.request.request cimport Watched

cdef struct PythonExecution:
    NativeBatch *batch
    PyObject *instance       # an inferd.backends.api.Instance, borrowed; NULL: there is no such execution
    PyObject *name           # of the instance, borrowed
    bint isolates            # `instance.isolates_failures`, for requests that belong to no sequence
    bint stoppable           # `instance.stop` is called when no client waits for the batch any more
    bint begun               # the instance has begun the batch, and is to end it
    Watched watched

# Execute the batch, with or without success. The caller calls batch_begin before and batch_finish after.
cdef void python_execute(PythonExecution *execution) noexcept nogil
# Execute the batch in two steps, with an inferd.backends.api.AsyncInstance. If python_begin fails, the batch has its
# errors, and python_end does nothing.
cdef void python_begin(PythonExecution *execution) noexcept nogil
cdef void python_end(PythonExecution *execution) noexcept nogil
# `before` has just ended, and `execution` was begun while it ran: count the time in between as queue time of the batch
# of `execution`.
cdef void python_follow(PythonExecution *execution, const PythonExecution *before) noexcept nogil
