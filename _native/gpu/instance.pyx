"""Instances on a GPU.

An instance has three streams and three buffer sets: while one batch is computed, the next one is gathered and uploaded,
and the previous one is downloaded. The instance's thread only submits work and never waits for the device. It waits for
a free set, and until the batch before the last one is computed, so that requests stay in the lane, where they can form
larger batches, and not on the device. A second thread waits for the device without the GIL, and answers.

    thread of the instance              streams                        thread of completions
    take a batch, gather it into
    one page-locked block        copy-in   one copy of all inputs
    let the backend submit       compute   waits for it; the model      waits until computed: the next may be taken
    submit the copies back       copy-out  waits for it; the outputs    waits until copied: answers, frees the set

Responses are sent from the page-locked block to which the outputs were copied.
"""

cimport cython
from libc.stdint cimport uint32_t

from inferd._native.atomic cimport load32, load64
from inferd._native.clock cimport now_ns
from inferd._native.cuda.device cimport use_device
from inferd._native.cuda.driver cimport cuda
from inferd._native.cuda.memory cimport DevicePool, PageLocked
from inferd._native.execution.batch cimport batch_begin, batch_fail_by, batch_fetch, batch_finish
from inferd._native.execution.batchlog cimport batch_log
from inferd._native.execution.gather cimport batch_describe
from inferd._native.execution.loop cimport ExecutionLoop
from inferd._native.gpu.batch cimport GpuBatch, batch_on_device
from inferd._native.gpu.bufferset cimport SETS, BufferSet, Pipeline
from inferd._native.gpu.graphs cimport Graphs
from inferd._native.gpu.transfer cimport Transfer
from inferd._native.request.lane cimport LaneHandle
from inferd._native.request.request cimport Request
from inferd._native.scheduling.limiter cimport ClaimHandle
from inferd._native.text cimport text_of, text_or_no_memory
from inferd._native.threads cimport thread_name

import logging
import threading

logger = logging.getLogger("inferd.instance")


@cython.no_gc
cdef class GpuLoop(ExecutionLoop):
    """What the threads of one instance on a GPU do (`inferd._native.execution.loop`).

    Args:
        instance: an inferd.backends.api.GpuInstance.
        claim: as for every instance; with one, it executes one batch at a time.
        spec: the inferd.backends.api.GpuSpec of the model.
        pinned: page-locked memory; ordinary memory is used where it has none left.
        pool: memory of the instance's device.
    """

    cdef Transfer transfer
    cdef Pipeline pipeline
    cdef Graphs graphs
    cdef BufferSet *set      # for the next batch
    cdef bint lost_told
    cdef bint writes_inputs  # the model may write to them; then it does not get clients' regions in place

    def __cinit__(self, LaneHandle lane not None, instance, str name not None, uint32_t index, ClaimHandle claim, spec,
                  PageLocked pinned not None, DevicePool pool not None):
        self.writes_inputs = getattr(instance, "writes_inputs", True)
        self.transfer = Transfer(pinned, pool, instance.stream, spec.pinned_inputs, spec.pinned_outputs)
        self.pipeline = Pipeline(lane, pool, spec.busy_wait, claim is not None)
        self.graphs = Graphs(lane, self.transfer, self.pipeline)

    @property
    def held(self) -> int:
        """Bytes of the device that it keeps: buffers for inputs, and for the outputs of graphs."""
        return load64(&self.transfer.held)

    # -- the thread that submits --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Set the thread up. Call it first, on the instance's thread."""
        ExecutionLoop.prepare(self)
        self.transfer.device.use()

    def capture(self, specs) -> None:
        """Capture CUDA graphs, see `Graphs.capture`; on the instance's thread, before `run`."""
        self.transfer.device.use()
        self.graphs.capture(self.instance, specs)

    @property
    def busy_ns(self) -> int:
        """Nanoseconds from taking a batch to answering it, without batches that are executed now; batches overlap."""
        return sum([load64(&self.pipeline.sets[i].batch.busy_ns) for i in range(SETS)])

    @property
    def running(self) -> int:
        """Requests that it executes now."""
        return sum([load64(&self.pipeline.sets[i].batch.running) for i in range(SETS)])

    def run(self) -> None:
        """Serve batches until nothing more will come, and all are answered. Call it on the instance's thread."""
        completions = threading.Thread(target=self._complete, name=f"{self.name} completions", daemon=True)
        completions.start()
        try:
            ExecutionLoop.run(self)
        finally:
            self.pipeline.close()
            completions.join()
            self.graphs.clear()

    cdef bint is_ready(self) noexcept nogil:
        return True  # get_ready never waits for long

    cdef void get_ready(self) noexcept nogil:
        self.set = self.pipeline.acquire()

    cdef void go_on(self) noexcept nogil:
        # the set that get_ready has acquired gets no batch
        self.pipeline.computed()
        self.pipeline.release(self.set)

    cdef void serve(self, Request *chain) noexcept nogil:
        with gil:
            self.start(self.set, chain)
        self.pipeline.submit(self.set)

    cdef void serve_alone(self, Request *chain) noexcept nogil:
        with gil:
            self.start(self.set, chain)
        self.conclude(self.set)

    cdef void start(self, BufferSet *set, Request *chain):
        # submit all work for a batch
        cdef bint ready
        with nogil:
            set.batch.writes_inputs = self.writes_inputs
            batch_begin(&set.batch, chain)
            batch_log(&set.batch, self.label, self.consumer.why)
            batch_fetch(&set.batch, self.transfer.device.ordinal, False)
            use_device(self.transfer.device)  # fetching inputs from another device may have changed it
            ready = (set.batch.count > 0 and batch_describe(&set.batch)
                     and self.transfer.upload(set, self.graphs.choose(set)))
        if ready:
            self.execute(set)
        with nogil:
            if set.submitted:
                self.transfer.download(set)

    cdef void execute(self, BufferSet *set):
        # whatever the backend raises, the batch is answered and the instance continues
        cdef GpuBatch batch
        cdef str text
        try:
            if set.graph >= 0:
                self.graphs.launch(set)
                return
            batch = batch_on_device(self.transfer, self.pipeline, set, None)
            try:
                self.instance.submit(batch)
            finally:
                batch.set = NULL
        except BaseException as error:
            set.batch.blamed = not set.batch.failed and getattr(error, "blames_requests", False)
            text = batch_fail_by(&set.batch, text_of(error))
            logger.error("instance %s failed a batch of %d requests: %s", self.name, set.batch.count, text,
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
        use_device(self.transfer.device)  # writing a response to a region on another device may have changed it
        if set.submitted:
            self.transfer.failed(set, cuda.event_synchronize(set.computed), "cuEventSynchronize")
            set.batch.output_start_ns = now_ns()
        self.pipeline.computed()
        if set.submitted:
            self.transfer.failed(set, cuda.event_synchronize(set.finished), "cuEventSynchronize")
            if set.batch.failed:
                self.transfer.synchronize()  # it may lack the events that order its work
        self.transfer.conclude(set)
        batch_finish(&set.batch)
        if set.holding:
            with gil:
                self.let_go(set)
        self.pipeline.release(set)

    cdef void let_go(self, BufferSet *set) noexcept:
        # release the objects that the backend kept for the batch: no work uses them any more
        set.holding = False
        self.pipeline.holds[set.index].clear()

    cdef void tell_lost(self) noexcept:
        try:
            logger.error("instance %s: %s", self.name, text_or_no_memory(self.transfer.lost_details).decode())
            self.instance.lost()
        except Exception:
            logger.exception("instance %s", self.name)
