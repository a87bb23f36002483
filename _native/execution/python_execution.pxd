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

# Execute the batch, with or without success. The caller has begun it (batch_begin), and finishes it.
cdef void python_execute(PythonExecution *execution) noexcept nogil
# The same in two steps, of an inferd.backends.api.AsyncInstance. If the batch could not begin, nothing is to be ended.
cdef void python_begin(PythonExecution *execution) noexcept nogil
cdef void python_end(PythonExecution *execution) noexcept nogil
# The execution was begun while the one `before`, which has ended now, was executed: until then its batch has waited,
# which counts as time in the queue.
cdef void python_follow(PythonExecution *execution, const PythonExecution *before) noexcept nogil
