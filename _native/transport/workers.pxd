# Work that would keep the event loop too long: threads that do it, and the way back to the loop.

from libc.stdint cimport int32_t

from _native.chain cimport Chain, Link
from _native.threads cimport Condition, Mutex

cdef struct Job:
    # One piece of work; the first member of the structure that describes it.
    Link link
    void (*run)(Job *job) noexcept nogil     # on a worker, without the GIL
    void (*done)(Job *job) noexcept nogil    # then on the loop; frees the job
    int32_t cancelled        # atomic: the result is not wanted any more; `run` may end early

cdef struct Crew:
    Mutex guard              # guards all but event_fd
    Condition work
    Chain waiting            # Job, to do
    Chain finished           # Job, in the order in which they were finished
    bint closing
    int event_fd             # readable when jobs are finished

# On the loop: hand over a job.
cdef void crew_submit(Crew *crew, Job *job) noexcept nogil
# On the loop: call `done` of every finished job.
cdef void crew_drain(Crew *crew) noexcept nogil


cdef class Workers:
    cdef Crew crew
    cdef list threads
    cdef readonly int event_fd
    cdef void work(self) noexcept nogil
