"""Instances on a GPU.

Three streams and three sets of buffers: while a batch is computed, the next one is gathered and uploaded, and the last
one is downloaded. The instance's thread only submits work and never waits for the device; what it may wait for is a
free set, and that the batch before the last one is computed, so that requests stay in the lane, where they can form
larger batches, instead of lining up on the device. A second thread waits for the device without the GIL and answers.

    thread of the instance              streams                        thread of completions
    take a batch, gather it into
    one page-locked block        copy-in   one copy of all inputs
    let the backend submit       compute   waits for it; the model      waits until computed: the next may be taken
    submit the copies back       copy-out  waits for it; the outputs    waits until copied: answers, frees the set

Requests are answered out of the page-locked block that their outputs were copied to.
"""

cimport cython
from libc.stdint cimport uint32_t
from libc.string cimport memset

from _native.atomic cimport load32, load64, store32
from _native.clock cimport now_ns
from _native.cuda.batch cimport GpuBatch, batch_on_device
from _native.cuda.bufferset cimport BufferSet, Pipeline
from _native.cuda.device cimport use_device
from _native.cuda.driver cimport cuda
from _native.cuda.graphs cimport Graphs
from _native.cuda.memory cimport DevicePool, PageLocked
from _native.cuda.transfer cimport Transfer
from _native.execution.batch cimport batch_begin, batch_fail, batch_fetch, batch_finish
from _native.execution.batchlog cimport batch_log
from _native.execution.gather cimport batch_describe
from _native.execution.rehearsal cimport Outcome, rehearsal_end, rehearsal_requests
from _native.inference.bridge cimport BridgeHandle
from _native.inference.request cimport Request
from _native.scheduling.lane cimport LaneHandle, Seat
from _native.scheduling.limiter cimport ClaimHandle, claim_acquire, claim_release
from _native.text cimport format_text, text_of, text_or_no_memory
from _native.threads cimport prepare_thread, thread_name

import logging
import threading

logger = logging.getLogger("inferd.instance")


@cython.no_gc
cdef class GpuLoop:
    """What the threads of one instance on a GPU do.

    Args:
        lane: where its batches come from.
        instance: a backends.api.GpuInstance.
        spec: the backends.api.GpuSpec of the model.
        name: of the instance, for logs and threads.
        index: its number among the instances of its version, from 0.
        pinned: page-locked memory; what it lacks is taken of ordinary memory.
        pool: memory of the instance's device.
        claim: to the resources that it must hold while it executes, one batch at a time then; None for none.
    """

    cdef LaneHandle lane
    cdef Seat seat
    cdef ClaimHandle claim
    cdef object instance
    cdef readonly str name
    cdef bytes encoded_name
    cdef const char *label   # the name, as C has it
    cdef Transfer transfer
    cdef Pipeline pipeline
    cdef Graphs graphs
    cdef bint lost_told

    def __cinit__(self, LaneHandle lane not None, instance, spec, str name not None, uint32_t index,
                  PageLocked pinned not None, DevicePool pool not None, ClaimHandle claim=None):
        self.lane = lane
        self.seat.index = index
        self.claim = claim
        if claim is not None:
            self.seat.claim = &claim.claim
        self.instance = instance
        self.name = name
        self.encoded_name = name.encode()
        self.label = self.encoded_name
        self.transfer = Transfer(pinned, pool, instance.stream, spec.pinned_inputs, spec.pinned_outputs)
        self.pipeline = Pipeline(lane, pool, spec.busy_wait, claim is not None)
        self.graphs = Graphs(lane, self.transfer, self.pipeline)

    @property
    def held(self) -> int:
        """Bytes of the device that it keeps: buffers for inputs, and for the outputs of graphs."""
        return load64(&self.transfer.held)

    # -- the thread that submits --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Set the thread up; first of all, on the instance's thread."""
        prepare_thread(self.name)
        self.transfer.device.use()

    def capture(self, specs) -> None:
        """Capture CUDA graphs, see `Graphs.capture`; on the instance's thread, before `run`."""
        self.transfer.device.use()
        self.graphs.capture(self.instance, specs)

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
        cdef BufferSet *set
        memset(&outcome, 0, sizeof(Outcome))
        chain = rehearsal_requests(self.lane.lane, tensors, count, &bridge.bridge, &outcome)
        self.seat.why = "warm-up"
        with nogil:
            set = self.pipeline.acquire()
            if self.seat.claim != NULL:
                claim_acquire(self.seat.claim)
        self.start(set, chain)
        with nogil:
            self.conclude(set)
        rehearsal_end(bridge, &outcome)

    def retire(self) -> None:
        """Have it end after the batches that it has taken; wake it if it waits (`QueueLane.nudge`)."""
        store32(&self.seat.retired, 1)

    def run(self) -> None:
        """Serve batches until the lane is closed and empty, and all are answered. Call it on the instance's thread."""
        completions = threading.Thread(target=self._complete, name=f"{self.name} completions", daemon=True)
        completions.start()
        try:
            while self.run_once():
                pass
        finally:
            self.pipeline.close()
            completions.join()
            for holds in self.pipeline.holds:
                holds.clear()
            self.graphs.clear()

    cdef bint run_once(self):
        cdef BufferSet *set
        cdef Request *chain
        with nogil:
            set = self.pipeline.acquire()
            chain = self.lane.lane.scheduler.take(self.lane.lane, &self.seat)
            if chain != NULL and self.seat.claim != NULL:
                claim_acquire(self.seat.claim)
        if chain == NULL:
            self.pipeline.release(set)
            return False
        self.start(set, chain)
        with nogil:
            self.pipeline.submit(set)
        return True

    cdef void start(self, BufferSet *set, Request *chain):
        # everything that is submitted for a batch
        cdef bint ready
        with nogil:
            batch_begin(&set.batch, chain)
            batch_log(&set.batch, self.label, self.seat.why)
            batch_fetch(&set.batch, self.transfer.device.ordinal, False)
            use_device(self.transfer.device)  # to fetch from another may have changed it
            ready = (set.batch.count > 0 and batch_describe(&set.batch)
                     and self.transfer.upload(set, self.graphs.choose(set)))
        self.pipeline.holds[set.index].clear()  # of the batch that had the set before, which is answered
        if ready:
            self.execute(set)
        with nogil:
            if set.submitted:
                self.transfer.download(set)

    cdef void execute(self, BufferSet *set):
        # whatever the backend raises, the batch is answered and the instance goes on
        cdef GpuBatch batch
        cdef bytes text
        try:
            if set.graph >= 0:
                self.graphs.launch(set)
                return
            batch = batch_on_device(self.transfer, self.pipeline, set, False)
            try:
                self.instance.submit(batch)
            finally:
                batch.set = NULL
        except BaseException as error:
            text = text_of(error).encode("utf-8", "replace")
            set.batch.blamed = not set.batch.failed and getattr(error, "blames_requests", False)
            batch_fail(&set.batch, format_text("%s", <const char *>text))
            logger.error("instance %s failed a batch of %d requests: %s", self.name, set.batch.count, text.decode(),
                         exc_info=logger.isEnabledFor(logging.DEBUG))

    # -- the thread that completes ------------------------------------------------------------------------------------

    def _complete(self) -> None:
        thread_name(b"gpu-completions")
        self.transfer.device.use()
        with nogil:
            self.complete()

    cdef void complete(self) noexcept nogil:
        cdef BufferSet *set = self.pipeline.next_submitted()
        while set != NULL:
            self.conclude(set)
            if load32(&self.transfer.lost) and not self.lost_told:
                self.lost_told = True
                with gil:
                    self.tell_lost()
            set = self.pipeline.next_submitted()

    cdef void conclude(self, BufferSet *set) noexcept nogil:
        # wait for a batch, answer it, and free its set
        use_device(self.transfer.device)  # an answer to a region on another device may have changed it
        if set.submitted:
            self.transfer.failed(set, cuda.event_synchronize(set.computed), "cuEventSynchronize")
            set.batch.output_start_ns = now_ns()
        self.pipeline.computed()
        if set.submitted:
            self.transfer.failed(set, cuda.event_synchronize(set.finished), "cuEventSynchronize")
            if set.batch.failed:
                self.transfer.settle()
        if self.seat.claim != NULL:
            claim_release(self.seat.claim)
        self.transfer.conclude(set)
        batch_finish(&set.batch)
        self.pipeline.release(set)

    cdef void tell_lost(self) noexcept:
        try:
            logger.error("instance %s: %s", self.name, text_or_no_memory(self.transfer.lost_details).decode())
            self.instance.lost()
        except Exception:
            logger.exception("instance %s", self.name)
