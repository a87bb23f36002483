"""The loop of an instance's thread: takes batches and has them executed, until no more will come.

Kinds of instances differ in the execution: `inferd._native.execution.instance` for those on the host or in another
process, `inferd._native.gpu.instance` for those on a GPU.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_GetPointer
from libc.stdint cimport uint32_t
from libc.string cimport memset

from inferd._native.execution.batch cimport await_fn
from inferd._native.execution.warmup cimport Outcome, warmup_end, warmup_requests
from inferd._native.request.bridge cimport BridgeHandle
from inferd._native.request.lane cimport LaneHandle
from inferd._native.request.request cimport Request
from inferd._native.scheduling.dispatcher cimport GIVEN_END
from inferd._native.scheduling.limiter cimport ClaimHandle
from inferd._native.scheduling.waking cimport (
    consumer_clear,
    consumer_hold,
    consumer_init,
    consumer_release,
    consumer_retire,
    consumer_take,
)
from inferd._native.threads cimport prepare_thread


@cython.no_gc
cdef class ExecutionLoop:
    """Base of the loops of instances and of GPUs.

    Args:
        lane: where its batches come from.
        instance: its attribute `gate`, if any, is a capsule named "inferd.await_fn" around an `await_fn`, which is
            called before each batch and may wait.
        name: of the instance, for logs and the thread.
        index: its number among the instances of its version, from 0.
        claim: on the resources of the lane's limiter that the instance holds while it executes; None: it needs none.
    """

    def __cinit__(self, LaneHandle lane not None, instance, str name not None, uint32_t index=0,
                  ClaimHandle claim=None, *args, **kwargs):
        gate = getattr(instance, "gate", None)
        self.lane = lane
        self.claim = claim
        self.instance = instance
        self.name = name
        self.encoded_name = name.encode()
        self.label = self.encoded_name
        self.consumer.index = index
        if claim is not None:
            if claim.limiter is not lane.limiter:
                raise ValueError("the claim belongs to another limiter than the lane's")
            self.consumer.claim = &claim.claim
        if gate is not None:
            self.gate = <await_fn>PyCapsule_GetPointer(gate, "inferd.await_fn")
            self.gate_context = PyCapsule_GetContext(gate)
        consumer_init(&self.consumer)

    def __dealloc__(self):
        consumer_clear(&self.consumer)

    def prepare(self) -> None:
        """Set the thread up. Call it first, on the instance's thread."""
        prepare_thread(self.name)

    def warm_up(self, dict tensors not None, uint32_t count) -> None:
        """Execute a batch of `count` requests without the lane, on the instance's thread, before `run`.

        Args:
            tensors: of each request: name to shape and bytes.

        Raises:
            ValueError: they do not fit the model, or one fails.
        """
        cdef BridgeHandle bridge = BridgeHandle()
        cdef Outcome outcome
        cdef Request *chain
        memset(&outcome, 0, sizeof(Outcome))
        chain = warmup_requests(self.lane.lane, tensors, count, &bridge.bridge, &outcome)
        with nogil:
            self.get_ready()
            self.serve_alone(consumer_hold(&self.consumer, chain))
            consumer_release(&self.consumer)
        warmup_end(bridge, &outcome)

    def run(self) -> None:
        """Serve batches until the lane is closed and empty, or the instance is retired. For the instance's thread."""
        with nogil:
            self.work()

    def retire(self) -> None:
        """End after the batches that it has taken, or at once if it waits for one."""
        consumer_retire(self.lane.lane, &self.consumer)

    cdef void work(self) noexcept nogil:
        cdef Request *chain
        while True:
            if self.consumer.claim != NULL and not self.is_ready():
                consumer_release(&self.consumer)  # get_ready may take long
            self.get_ready()
            chain = consumer_take(self.lane.lane, &self.consumer)
            if chain != NULL:
                self.serve(chain)
                continue
            self.go_on()
            if self.consumer.given == GIVEN_END:
                return

    cdef bint is_ready(self) noexcept nogil:
        return self.gate == NULL

    cdef void get_ready(self) noexcept nogil:
        if self.gate != NULL:
            self.gate(self.gate_context)

    cdef void serve(self, Request *chain) noexcept nogil:
        pass

    cdef void serve_alone(self, Request *chain) noexcept nogil:
        self.serve(chain)

    cdef void go_on(self) noexcept nogil:
        pass
