"""Instances whose executions are brief: a few microseconds, without waiting for anything.

To wake the instance's thread for such an execution, and then the front for the response, takes several times as long as
the execution. So while that thread waits for a batch, its consumer is lent to the front
(`inferd._native.scheduling.calling`), which executes the batch at once. The thread is called for batches with more
bytes than the front should copy, and with inputs on a GPU.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from inferd._native.execution.batch cimport batch_begin, batch_finish
from inferd._native.execution.batchlog cimport batch_log
from inferd._native.request.bridge cimport Bridge, bridge_promise
from inferd._native.request.request cimport Request
from inferd._native.scheduling.calling cimport consumer_next, consumer_recall


cdef void brief_connect(BriefInstance *self) noexcept nogil:
    self.consumer.instance = self
    self.consumer.ready = is_ready
    self.consumer.begin = begin


cdef bint is_ready(Consumer *consumer) noexcept nogil:
    return True


cdef void begin(Consumer *consumer, Request *chain) noexcept nogil:
    # serve this batch, and those that have formed meanwhile
    cdef BriefInstance *self = <BriefInstance *>consumer.instance
    while chain != NULL:
        if not is_small(chain):
            consumer_recall(consumer, chain)
            return
        bridge_promise(<Bridge *>chain.bridge)
        execute(self, chain)
        chain = consumer_next(consumer)


cdef inline void execute(BriefInstance *self, Request *chain) noexcept nogil:
    batch_begin(self.batch, chain)
    batch_log(self.batch, self.name, self.consumer.why)
    if self.batch.count:
        self.executor(self.batch, self.context)
    batch_finish(self.batch)


cdef bint is_small(const Request *chain) noexcept nogil:
    cdef size_t size = 0
    cdef uint32_t i
    while chain != NULL:
        if chain.on_device:
            return False
        for i in range(chain.signature.input_count):
            size += chain.inputs[i].size
        if size > BRIEF_BYTES:
            return False
        chain = chain.next
    return True
