# The thread pool: work that would keep an I/O thread too long, and the way of its results back to the front.
#
# A thread does a slice of a job, charges the client for it (`inferd._native.shares`), and takes a job of the client
# whose turn is next. So a client with large messages, or with many, does not delay another client's small one.

from libc.stdint cimport int32_t, uint64_t

from inferd._native.shares cimport Shares, Waiting
from inferd._native.threads cimport Condition, Mutex
from inferd._native.transport.ledger cimport Account

cdef struct Job:
    # One piece of work; the first member of the structure that describes it.
    Waiting waiting          # until it is finished, or withdrawn
    bint waits               # no thread works at it
    # Called on a thread of the pool, without the GIL: work for about a millisecond. Returns the bytes that this took;
    # sets `whole` when there is no more to do.
    uint64_t (*run)(Job *job) noexcept nogil
    bint whole
    void (*done)(Job *job) noexcept nogil    # afterwards, in the front; frees the job
    size_t output            # bytes of memory that its result takes so far: set by `run`
    # Called in the front with the guard held, after `told` has been set to `output`; NULL: no call.
    void (*grew)(Job *job) noexcept nogil
    size_t told
    bint telling             # it is in ThreadPool.grown
    Job *grown               # the following one there
    int32_t cancelled        # atomic: the result is not wanted; `run` may end early
    Job *following           # in ThreadPool.finished

cdef struct ThreadPool:
    Mutex guard              # protects the rest, and Job.waits, told, telling and grown
    Condition work
    Shares shares            # of the clients that have jobs
    Job *finished            # the latest first
    Job *grown               # jobs that take more memory than was told
    bint closing
    int event_fd             # readable when jobs are finished
    Account departed         # used in the front: the bytes held by jobs of calls that have ended

# In the front: submit a job of a client. False: no memory.
cdef bint thread_pool_submit(ThreadPool *thread_pool, Job *job, uint64_t client) noexcept nogil
# In the front: withdraw a job at which no thread works. False: a thread does, or it is done.
cdef bint thread_pool_withdraw(ThreadPool *thread_pool, Job *job) noexcept nogil
# In the front: call `grew` of jobs that have grown, then `done` of every finished job.
cdef void thread_pool_drain(ThreadPool *thread_pool) noexcept nogil


cdef class PoolThreads:
    cdef ThreadPool thread_pool
    cdef list threads
    cdef readonly int event_fd
    cdef void work(self) noexcept nogil
