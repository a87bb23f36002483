"""Giving memory back to the system: the pool of host memory and the allocator keep what is free, for the next peak."""

from libc.stdlib cimport calloc, free

from _native.memory.host cimport host_trim
from _native.transport.workers cimport Crew, Job, crew_submit

cdef extern from *:
    """
    #if defined(__GLIBC__)
    #include <malloc.h>
    static void inferd_malloc_trim(void) { malloc_trim(0); }
    #else
    static void inferd_malloc_trim(void) {}
    #endif
    """
    void malloc_trim "inferd_malloc_trim"() nogil


cdef void run(Job *job) noexcept nogil:
    host_trim()
    malloc_trim()


cdef void done(Job *job) noexcept nogil:
    free(job)


cdef void memory_trim(Crew *crew) noexcept nogil:
    cdef Job *job = <Job *>calloc(1, sizeof(Job)) if crew != NULL else NULL
    if job == NULL:
        run(NULL)
        return
    job.run = run
    job.done = done
    crew_submit(crew, job)
