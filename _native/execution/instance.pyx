"""Instances on the host: native ones, Python ones, and those whose work runs in another process.

An instance in Python whose executions run on threads of its framework (inferd.backends.api.AsyncInstance) may have an
alternate. While the one executes a batch, the other begins the next, so that the framework never pauses between them.
Only a full batch is taken so early: any other waits in the lane, where it can still grow.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_GetPointer
from libc.stdint cimport SIZE_MAX, uint32_t

from inferd._native.atomic cimport load64
from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport (
    NativeBatch,
    batch_begin,
    batch_fetch,
    batch_finish,
    batch_free,
    batch_init,
    execute_fn,
)
from inferd._native.execution.batchlog cimport batch_log
from inferd._native.execution.brief cimport BRIEF_BYTES, Brief, brief_init
from inferd._native.execution.isolation cimport execute_each, may_execute_each
from inferd._native.execution.loop cimport ExecutionLoop
from inferd._native.execution.python_execution cimport (
    PythonExecution,
    python_begin,
    python_end,
    python_execute,
    python_follow,
)
from inferd._native.execution.remote cimport Remote, RemoteInstance, remote_connect, remote_disconnect
from inferd._native.request.lane cimport LaneHandle
from inferd._native.request.request cimport Request
from inferd._native.scheduling.limiter cimport ClaimHandle
from inferd._native.scheduling.waking cimport consumer_take_full


@cython.no_gc
cdef class InstanceLoop(ExecutionLoop):
    """What the thread of one instance does (`inferd._native.execution.loop`).

    Args:
        instance: an inferd.backends.api.Instance. It may have these attributes:
            `executor`, a capsule named "inferd.execute_fn" around an `execute_fn` with its context: batches never
            touch Python;
            `remote`, a capsule named "inferd.remote" around a `Remote`: the front begins and ends executions itself;
            `brief`, true: the front executes small batches;
            `input_device`: inputs on that GPU stay there;
            `stoppable`, true: it is told when no client waits any more for the batch that it executes;
            `writes_inputs`, false: its inputs may be memory that others can see;
            `alternate`: the two execute batches alternately.
    """

    cdef NativeBatch batch
    cdef execute_fn executor  # NULL: in Python
    cdef void *context
    cdef RemoteInstance remote   # `remote`: NULL if there is no way for the front
    cdef Brief brief             # the `remote` of a brief instance
    cdef bint connected      # the front may use it: it has neither sequences nor a claim
    cdef int input_device    # -1: none
    cdef NativeBatch alternate_batch
    cdef object alternate    # None: it has none
    cdef PythonExecution executions[2]  # of the instance and of its alternate, in Python

    def __cinit__(self, LaneHandle lane not None, instance, str name not None, uint32_t index=0,
                  ClaimHandle claim=None):
        # Batches may overlap, but not with sequences, whose next batch needs the states of this one, nor with a claim,
        # which covers one execution.
        cdef bint may_overlap = lane.lane.sequences == NULL and lane.limiter is None
        executor = getattr(instance, "executor", None)
        remote = getattr(instance, "remote", None)
        if executor is not None:
            self.executor = <execute_fn>PyCapsule_GetPointer(executor, "inferd.execute_fn")
            self.context = PyCapsule_GetContext(executor)
        self.input_device = getattr(instance, "input_device", -1)
        batch_init(&self.batch, lane.lane)
        self.set_execution(&self.executions[0], &self.batch, instance)
        if may_overlap:
            self.alternate = getattr(instance, "alternate", None)
        if self.alternate is not None:
            batch_init(&self.alternate_batch, lane.lane)
            self.set_execution(&self.executions[1], &self.alternate_batch, self.alternate)
        if remote is not None:
            self.remote.remote = <Remote *>PyCapsule_GetPointer(remote, "inferd.remote")
            self.remote.most = SIZE_MAX
        elif may_overlap and self.executor != NULL and getattr(instance, "brief", False) and (
                self.gate == NULL and not self.executions[0].isolates):
            brief_init(&self.brief, self.executor, self.context)
            self.remote.remote = &self.brief.remote
            self.remote.most = BRIEF_BYTES
        self.remote.consumer = &self.consumer
        self.remote.batch = &self.batch
        self.remote.name = self.label
        self.connected = may_overlap and self.remote.remote != NULL
        if self.connected:
            remote_connect(&self.remote)

    def __dealloc__(self):
        if self.connected:
            remote_disconnect(&self.remote)
        batch_free(&self.batch)
        batch_free(&self.alternate_batch)

    cdef void set_execution(self, PythonExecution *execution, NativeBatch *batch, object instance):
        batch.writes_inputs = getattr(instance, "writes_inputs", True)
        execution.batch = batch
        execution.instance = <PyObject *>instance
        execution.name = <PyObject *>self.name
        # an abandoned request of a sequence is executed nevertheless: later requests depend on the state that it leaves
        execution.stoppable = batch.lane.sequences == NULL and getattr(instance, "stoppable", False)
        # an execution that has failed may have written to the states of its sequences
        execution.isolates = batch.lane.sequences == NULL and getattr(instance, "isolates_failures", False)

    cdef bint is_ready(self) noexcept nogil:
        if self.remote.remote != NULL:
            return self.remote.remote.ready(self.remote.remote.context)
        return ExecutionLoop.is_ready(self)

    @property
    def busy_ns(self) -> int:
        """Nanoseconds of the executions that have ended."""
        return load64(&self.batch.busy_ns) + load64(&self.alternate_batch.busy_ns)

    @property
    def running(self) -> int:
        """Requests that it executes now."""
        return load64(&self.batch.running) + load64(&self.alternate_batch.running)

    cdef void serve(self, Request *chain) noexcept nogil:
        if self.executor == NULL:
            self.serve_in_python(chain, self.executions[1].instance != NULL)
            return
        self.take(&self.batch, chain)
        if self.batch.count:
            self.executor(&self.batch, self.context)
            if self.batch.failed and self.executions[0].isolates and may_execute_each(&self.batch):
                execute_each(&self.batch, self.executor, self.context)
        batch_finish(&self.batch)

    cdef void serve_alone(self, Request *chain) noexcept nogil:
        if self.executor == NULL:
            self.serve_in_python(chain, False)
        else:
            self.serve(chain)

    @cython.final
    cdef inline void take(self, NativeBatch *batch, Request *chain) noexcept nogil:
        batch_begin(batch, chain)
        batch_fetch(batch, self.input_device, True)
        batch_log(batch, self.label, self.consumer.why)

    cdef void go_on(self) noexcept nogil:
        if self.remote.begun:
            self.remote.begun = False
            if self.batch.count:
                self.executor(&self.batch, self.context)
            batch_finish(&self.batch)

    cdef void serve_in_python(self, Request *chain, bint with_alternate) noexcept nogil:
        self.take(&self.batch, chain)
        if with_alternate:
            self.serve_alternating()
            return
        if self.batch.count:
            python_execute(&self.executions[0])
        batch_finish(&self.batch)

    cdef void serve_alternating(self) noexcept nogil:
        # serve the taken batch, then each full batch that waits during the one before it
        cdef PythonExecution *current = &self.executions[0]
        cdef PythonExecution *following = &self.executions[1]
        cdef Request *chain
        python_begin(current)
        while True:
            chain = consumer_take_full(self.lane.lane, &self.consumer) if current.begun else NULL
            if chain != NULL:
                self.take(following.batch, chain)
                python_begin(following)
            python_end(current)
            if chain != NULL:
                python_follow(following, current)
            batch_finish(current.batch)
            if chain == NULL:
                return
            following.batch.busy_before_ns = now_ns()
            current, following = following, current
