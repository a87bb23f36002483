"""Brief executions: a few microseconds, without waiting for anything.

To wake the instance's thread for such an execution, and then the front for the response, takes several times as long as
the execution. So the front begins and ends it in a single step, in the way of executions in another process
(`inferd._native.execution.remote`).
"""

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.execution.remote cimport ENDED, Progress
from inferd._native.request.bridge cimport Bridge, bridge_promise


cdef void brief_init(Brief *self, execute_fn executor, void *context) noexcept nogil:
    self.executor = executor
    self.context = context
    self.remote.context = self
    self.remote.ready = is_ready
    self.remote.begin = begin


cdef bint is_ready(void *context) noexcept nogil:
    return True


cdef Progress begin(NativeBatch *batch, void *context) noexcept nogil:
    cdef Brief *self = <Brief *>context
    bridge_promise(<Bridge *>batch.requests[0].bridge)
    self.executor(batch, self.context)
    return ENDED
