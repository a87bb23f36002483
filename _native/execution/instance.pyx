"""Instances: each thread takes batches from its lane, has them executed, and answers, until the lane is closed."""

from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_GetPointer
from libc.stdint cimport uint32_t
from libc.string cimport memset

from _native.atomic cimport store32
from _native.execution.batch cimport (
    Batch,
    NativeBatch,
    await_fn,
    batch_begin,
    batch_fetch,
    batch_fail,
    batch_finish,
    batch_for_python,
    batch_free,
    batch_init,
    execute_fn,
)
from _native.execution.batchlog cimport batch_log
from _native.execution.gather cimport batch_gather
from _native.execution.rehearsal cimport Outcome, rehearsal_end, rehearsal_requests
from _native.execution.remote cimport Remote, RemoteInstance, remote_connect, remote_disconnect
from _native.inference.bridge cimport BridgeHandle
from _native.inference.request cimport Request, Watched, requests_unwatch, requests_watch
from _native.scheduling.lane cimport LaneHandle, Seat
from _native.scheduling.limiter cimport ClaimHandle, claim_acquire, claim_release
from _native.text cimport format_text, text_of
from _native.threads cimport prepare_thread

import logging

logger = logging.getLogger("inferd.instance")


cdef class InstanceLoop:
    """What the thread of one instance does.

    Args:
        lane: where its batches come from.
        instance: a backends.api.Instance; with an attribute `executor`, a capsule named "inferd.execute_fn" around an
            `execute_fn` with its context, batches never touch Python; with an attribute `gate`, a capsule named
            "inferd.await_fn" around an `await_fn`, that is asked before each batch; with a `remote`, a capsule named
            "inferd.remote" around a `Remote`, the loop begins and ends executions itself; with an `input_device`,
            inputs on that GPU stay there; with a true `stoppable`, it is told when nobody waits any more for the batch
            that it executes.
        name: of the instance, for logs and the thread.
        index: its number among the instances of its version, from 0.
        claim: to the resources that it must hold while it executes; None for none.
    """

    cdef LaneHandle lane
    cdef Seat seat
    cdef object instance
    cdef str name
    cdef bytes encoded_name
    cdef const char *label   # the name, as C has it
    cdef NativeBatch batch
    cdef execute_fn executor
    cdef void *context
    cdef await_fn gate
    cdef void *gate_context
    cdef RemoteInstance remote   # its `remote` is NULL for most
    cdef int input_device    # -1: none
    cdef ClaimHandle claim
    cdef bint stoppable
    cdef Watched watched     # the batch that is executed, if it may be stopped

    def __cinit__(self, LaneHandle lane not None, instance, str name not None, uint32_t index=0,
                  ClaimHandle claim=None):
        executor = getattr(instance, "executor", None)
        gate = getattr(instance, "gate", None)
        remote = getattr(instance, "remote", None)
        self.lane = lane
        self.seat.index = index
        self.claim = claim
        if claim is not None:
            self.seat.claim = &claim.claim
        self.instance = instance
        self.name = name
        self.encoded_name = name.encode()
        self.label = self.encoded_name
        self.executor = NULL
        self.context = NULL
        if executor is not None:
            self.executor = <execute_fn>PyCapsule_GetPointer(executor, "inferd.execute_fn")
            self.context = PyCapsule_GetContext(executor)
        self.gate = NULL
        self.gate_context = NULL
        if gate is not None:
            self.gate = <await_fn>PyCapsule_GetPointer(gate, "inferd.await_fn")
            self.gate_context = PyCapsule_GetContext(gate)
        self.input_device = getattr(instance, "input_device", -1)
        # what follows in a sequence depends on what was executed: it goes on as if somebody waited
        self.stoppable = lane.lane.settle == NULL and getattr(instance, "stoppable", False)
        self.watched.stop = stop_instance
        self.watched.owner = <void *>self
        batch_init(&self.batch, lane.lane)
        if remote is not None and claim is None:
            self.remote.remote = <Remote *>PyCapsule_GetPointer(remote, "inferd.remote")
            self.remote.lane = lane.lane
            self.remote.seat = &self.seat
            self.remote.batch = &self.batch
            self.remote.name = self.label
            remote_connect(&self.remote)

    def __dealloc__(self):
        if self.remote.remote != NULL:
            remote_disconnect(&self.remote)
        batch_free(&self.batch)

    def prepare(self) -> None:
        """Set the thread up; first of all, on the instance's thread."""
        prepare_thread(self.name)

    def rehearse(self, dict tensors not None, uint32_t count) -> None:
        """Execute a batch of `count` requests past the lane, on the instance's thread, before `run`.

        Args:
            tensors: of each request: name to shape and bytes.

        Raises:
            ValueError: they do not fit the model, or one fails.
        """
        cdef BridgeHandle bridge = BridgeHandle()
        cdef Outcome outcome
        cdef Request *chain
        memset(&outcome, 0, sizeof(Outcome))
        chain = rehearsal_requests(self.lane.lane, tensors, count, &bridge.bridge, &outcome)
        self.seat.why = "warm-up"
        with nogil:
            if self.gate != NULL:
                self.gate(self.gate_context)
            if self.seat.claim != NULL:
                claim_acquire(self.seat.claim)
        self.serve(chain)
        rehearsal_end(bridge, &outcome)

    def run(self) -> None:
        """Serve batches until the lane is closed and empty. Call it on the instance's thread."""
        if self.executor != NULL:
            with nogil:
                self.run_native()
        else:
            while self.run_once():
                pass

    def retire(self) -> None:
        """Have it end after the batch that it executes now; wake it if it waits (`QueueLane.nudge`)."""
        store32(&self.seat.retired, 1)

    cdef Request *take(self) noexcept nogil:
        # NULL: the end, or the loop has begun a batch that has to be ended here
        cdef Request *chain
        while True:
            if self.gate != NULL:
                self.gate(self.gate_context)
            self.seat.recalled = False
            chain = self.lane.lane.scheduler.take(self.lane.lane, &self.seat)
            if not self.seat.recalled or self.remote.begun:
                break
        if chain != NULL and self.seat.claim != NULL:
            claim_acquire(self.seat.claim)
        return chain

    cdef void begin(self, Request *chain) noexcept nogil:
        batch_begin(&self.batch, chain)
        batch_fetch(&self.batch, self.input_device, True)
        batch_log(&self.batch, self.label, self.seat.why)

    cdef void finish(self) noexcept nogil:
        if self.seat.claim != NULL:
            claim_release(self.seat.claim)
        batch_finish(&self.batch)

    cdef void run_native(self) noexcept nogil:
        while self.next_batch():
            if self.batch.count:
                self.executor(&self.batch, self.context)
            self.finish()

    cdef bint next_batch(self) noexcept nogil:
        # False: the end
        cdef Request *chain = self.take()
        cdef bint begun = self.remote.begun
        self.remote.begun = False
        if chain != NULL:
            self.begin(chain)
        return chain != NULL or begun

    cdef bint run_once(self):
        cdef Request *chain
        with nogil:
            chain = self.take()
        if chain == NULL:
            return False
        self.serve(chain)
        return True

    cdef void serve(self, Request *chain) noexcept:
        cdef bint ready
        with nogil:
            self.begin(chain)
            ready = self.batch.count > 0
            if ready and self.executor != NULL:
                self.executor(&self.batch, self.context)
            else:
                ready = ready and batch_gather(&self.batch) and self.watch()
        if ready and self.executor == NULL:
            self.execute()
            if self.stoppable:
                self.unwatch()
        with nogil:
            self.finish()

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
            batch.fail(text)
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
