# The thread pool: work that would block the event loop too long, and its way back to the loop.

from libc.stdint cimport int32_t

from _native.threads cimport Condition, Mutex
from _native.transport.ledger cimport Account

cdef struct Job:
    # One piece of work; the first member of the structure that describes it.
    Job *previous            # in a list of the pool's
    Job *next
    bint waits               # it is in ThreadPool.waiting
    void (*run)(Job *job) noexcept nogil     # on a thread of the pool, without the GIL
    void (*done)(Job *job) noexcept nogil    # afterwards, on the loop; frees the job
    int32_t cancelled        # atomic: the result is not wanted; `run` may end early

cdef struct Jobs:
    # see _native.list
    Job *first
    Job *last

cdef struct ThreadPool:
    Mutex guard              # protects the lists, and Job.waits
    Condition work
    Jobs waiting             # to do
    Jobs finished            # in the order of completion
    bint closing
    int event_fd             # readable when jobs are finished
    Account departed         # used on the loop: the bytes held by jobs of calls that have ended

# On the loop: submit a job.
cdef void thread_pool_submit(ThreadPool *thread_pool, Job *job) noexcept nogil
# On the loop: withdraw a job that no thread has begun. False: it is running, or done.
cdef bint thread_pool_withdraw(ThreadPool *thread_pool, Job *job) noexcept nogil
# On the loop: call `done` of every finished job.
cdef void thread_pool_drain(ThreadPool *thread_pool) noexcept nogil


cdef class Workers:
    cdef ThreadPool thread_pool
    cdef list threads
    cdef readonly int event_fd
    cdef void work(self) noexcept nogil
