"""Instances on the host: native ones, Python ones, and those whose work runs in another process."""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_GetPointer
from libc.stdint cimport uint32_t

from _native.atomic cimport load64
from _native.execution.batch cimport (
    NativeBatch,
    batch_begin,
    batch_fail,
    batch_fail_by,
    batch_fetch,
    batch_finish,
    batch_free,
    batch_init,
    execute_fn,
)
from _native.execution.batchlog cimport batch_log
from _native.execution.gather cimport batch_gather
from _native.execution.loop cimport ExecutionLoop
from _native.execution.python_batch cimport Batch, batch_for_python
from _native.execution.remote cimport Remote, RemoteInstance, remote_connect, remote_disconnect
from _native.request.lane cimport LaneHandle
from _native.request.request cimport Request, Watched, requests_unwatch, requests_watch
from _native.scheduling.limiter cimport ClaimHandle
from _native.text cimport format_text, text_of

import logging

logger = logging.getLogger("inferd.instance")


@cython.no_gc
cdef class InstanceLoop(ExecutionLoop):
    """What the thread of one instance does (`_native.execution.loop`).

    Args:
        instance: a backends.api.Instance; with an attribute `executor`, a capsule named "inferd.execute_fn" around an
            `execute_fn` with its context, batches never touch Python; with a `remote`, a capsule named "inferd.remote"
            around a `Remote`, the loop begins and ends executions itself; with an `input_device`, inputs on that GPU
            stay there; with a true `stoppable`, it is told when nobody waits any more for the batch that it executes;
            with a false `writes_inputs`, its inputs may be memory that others can see.
    """

    cdef NativeBatch batch
    cdef execute_fn executor  # NULL: in Python
    cdef void *context
    cdef RemoteInstance remote   # its `remote` is NULL for most
    cdef bint connected      # the loop may use it
    cdef int input_device    # -1: none
    cdef bint stoppable
    cdef Watched watched     # the batch that is executed, if it may be stopped

    def __cinit__(self, LaneHandle lane not None, instance, str name not None, uint32_t index=0,
                  ClaimHandle claim=None):
        executor = getattr(instance, "executor", None)
        remote = getattr(instance, "remote", None)
        if executor is not None:
            self.executor = <execute_fn>PyCapsule_GetPointer(executor, "inferd.execute_fn")
            self.context = PyCapsule_GetContext(executor)
        self.input_device = getattr(instance, "input_device", -1)
        # what follows in a sequence depends on what was executed: it goes on as if somebody waited
        self.stoppable = lane.lane.sequences == NULL and getattr(instance, "stoppable", False)
        self.watched.stop = stop_instance
        self.watched.owner = <void *>self
        batch_init(&self.batch, lane.lane)
        self.batch.writes_inputs = getattr(instance, "writes_inputs", True)
        if remote is not None:
            self.remote.remote = <Remote *>PyCapsule_GetPointer(remote, "inferd.remote")
            self.remote.consumer = &self.consumer
            self.remote.batch = &self.batch
            self.remote.name = self.label
            self.connected = lane.limiter is None and lane.lane.sequences == NULL
            if self.connected:
                remote_connect(&self.remote)

    def __dealloc__(self):
        if self.connected:
            remote_disconnect(&self.remote)
        batch_free(&self.batch)

    cdef bint is_ready(self) noexcept nogil:
        if self.remote.remote != NULL:
            return self.remote.remote.ready(self.remote.remote.context)
        return ExecutionLoop.is_ready(self)

    @property
    def busy_ns(self) -> int:
        """Nanoseconds in which it has executed batches, but for the one that it executes now."""
        return load64(&self.batch.busy_ns)

    @property
    def running(self) -> int:
        """Requests that it executes now."""
        return load64(&self.batch.running)

    cdef void serve(self, Request *chain) noexcept nogil:
        batch_begin(&self.batch, chain)
        batch_fetch(&self.batch, self.input_device, True)
        batch_log(&self.batch, self.label, self.consumer.why)
        if self.batch.count:
            if self.executor != NULL:
                self.executor(&self.batch, self.context)
            else:
                self.serve_in_python()
        batch_finish(&self.batch)

    cdef void go_on(self) noexcept nogil:
        if self.remote.begun:
            self.remote.begun = False
            if self.batch.count:
                self.executor(&self.batch, self.context)
            batch_finish(&self.batch)

    cdef void serve_in_python(self) noexcept nogil:
        if not (batch_gather(&self.batch) and self.watch()):
            return
        with gil:
            self.execute()
            if self.stoppable:
                self.unwatch()

    cdef bint watch(self) noexcept nogil:
        # False: nobody waits for the batch, it need not even begin
        if not self.stoppable:
            return True
        self.watched.requests = self.batch.requests
        self.watched.count = self.batch.count
        if requests_watch(&self.watched):
            return True
        self.batch.stopped = True
        batch_fail(&self.batch, format_text("nobody waits for the answer"))
        return False

    cdef void unwatch(self) noexcept:
        with nogil:
            requests_unwatch(&self.watched)
        if not self.watched.stopped:
            return
        self.batch.stopped = True
        logger.debug("instance %s: a batch of %d requests was stopped, nobody waits for it", self.name,
                     self.batch.count)
        try:
            self.instance.resume()
        except Exception:
            logger.exception("instance %s", self.name)

    cdef void execute(self) noexcept:
        # whatever the backend raises, the batch is answered and the instance goes on
        cdef Batch batch = batch_for_python(&self.batch, self.name)
        try:
            self.instance.execute(batch)
        except BaseException as error:
            text = text_of(error)
            self.batch.blamed = not self.batch.failed and getattr(error, "blames_requests", False)
            text = batch_fail_by(&self.batch, text)
            if not self.watched.stopped:
                logger.error("instance %s failed a batch of %d requests: %s", self.name, self.batch.count, text,
                             exc_info=logger.isEnabledFor(logging.DEBUG))
        finally:
            batch.batch = NULL  # whoever keeps the object finds that it is over


cdef void stop_instance(void *owner) noexcept nogil:
    with gil:
        try:
            (<InstanceLoop>owner).instance.stop()
        except Exception:
            logger.exception("instance %s", (<InstanceLoop>owner).name)
