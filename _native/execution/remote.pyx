"""Instances whose work needs no thread of the server: it runs in another process, or is brief.

While the thread of such an instance waits for a batch, its consumer may be lent to the front
(`inferd._native.scheduling.waking`). The front then sends the next batch itself, reads the results, and sends the
batch that has formed meanwhile. The thread is called for work that may block: batches with large inputs that must be
copied, inputs on a GPU, a worker that is gone or not started yet. Brief executions
(`inferd._native.execution.brief`) take the same way.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from inferd._native.execution.batch cimport batch_begin, batch_finish
from inferd._native.execution.batchlog cimport batch_log
from inferd._native.request.request cimport Request
from inferd._native.scheduling.dispatcher cimport Consumer
from inferd._native.scheduling.waking cimport consumer_next, consumer_recall


cdef void remote_connect(RemoteInstance *self) noexcept nogil:
    self.consumer.instance = self
    self.consumer.ready = is_ready
    self.consumer.begin = begin_lent
    self.remote.owner = self
    self.remote.readable = readable


cdef void remote_disconnect(RemoteInstance *self) noexcept nogil:
    self.remote.readable = NULL


cdef bint is_ready(Consumer *consumer) noexcept nogil:
    cdef RemoteInstance *self = <RemoteInstance *>consumer.instance
    return self.remote.ready(self.remote.context)


cdef void begin_lent(Consumer *consumer, Request *batch) noexcept nogil:
    serve((<RemoteInstance *>consumer.instance), batch)


cdef void readable(void *owner) noexcept nogil:
    cdef RemoteInstance *self = <RemoteInstance *>owner
    if self.running and not note_progress(self, self.remote.advance(self.batch, self.remote.context)):
        serve(self, consumer_next(self.consumer))


cdef void serve(RemoteInstance *self, Request *chain) noexcept nogil:
    # serve this batch and, as long as batches end at once, the ones that follow
    while chain != NULL and not start(self, chain):
        chain = consumer_next(self.consumer)


cdef bint start(RemoteInstance *self, Request *chain) noexcept nogil:
    # False: the batch is over
    if not may_begin(self, chain):
        consumer_recall(self.consumer, chain)
        return True
    batch_begin(self.batch, chain)
    batch_log(self.batch, self.name, self.consumer.why)
    return note_progress(self, self.remote.begin(self.batch, self.remote.context) if self.batch.count else ENDED)


cdef bint note_progress(RemoteInstance *self, Progress progress) noexcept nogil:
    # False: the batch is over
    self.running = progress == UNDER_WAY
    if progress == ENDED:
        batch_finish(self.batch)
    elif progress == BLOCKED:
        self.begun = True
        consumer_recall(self.consumer, NULL)
    return progress != ENDED


cdef bint may_begin(const RemoteInstance *self, const Request *chain) noexcept nogil:
    # whether the inputs are on the host, and few enough
    cdef size_t size = 0
    cdef uint32_t i
    while chain != NULL:
        if chain.on_device:
            return False
        for i in range(chain.signature.input_count):
            size += chain.inputs[i].size
        if size > self.most:
            return False
        chain = chain.next
    return True
