"""Returns memory to the system after a peak: otherwise the pool of host memory and the allocator would keep it."""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from inferd._native.memory.host cimport host_trim
from inferd._native.memory.small cimport smalls_clear
from inferd._native.timers cimport Timer, timers_clear, timers_set
from inferd._native.transport.stream cimport Host
from inferd._native.transport.thread_pool cimport Job, ThreadPool, thread_pool_submit

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

cdef enum:
    REST = 4                     # a peak is over when at most this part of it, 1 / REST, is left

cdef int64_t QUIET_NS = 3000000000  # for this long
cdef uint64_t OWN = 0  # the client of the server's own job, which takes turns with those of clients


# ---------------------------------------------------------------------------------------------------------------------
# The peak

cdef void host_note_peak(Host *host) noexcept nogil:
    cdef size_t now = host_kept(host)
    host.peak = max(host.peak, now)
    if host.peak < PEAK_FROM:
        return
    if now > host.peak // REST:
        timers_clear(host.timers, &host.quiet)
    elif host.quiet.slot == 0:
        host.quiet.fire = peak_is_over
        host.quiet.owner = host
        timers_set(host.timers, &host.quiet, host.now_ns + QUIET_NS)  # if this fails, the next call tries again


cdef void peak_is_over(Timer *timer, int64_t now) noexcept nogil:
    cdef Host *host = <Host *>timer.owner
    host.peak = host_kept(host)
    smalls_clear(&host.smalls)
    memory_trim(host.thread_pool)


# ---------------------------------------------------------------------------------------------------------------------
# Giving back


cdef uint64_t run(Job *job) noexcept nogil:
    job.whole = True
    host_trim()
    malloc_trim()
    return 0


cdef void done(Job *job) noexcept nogil:
    free(job)


cdef void memory_trim(ThreadPool *thread_pool) noexcept nogil:
    cdef Job *job = <Job *>calloc(1, sizeof(Job)) if thread_pool != NULL else NULL
    if job == NULL:
        host_trim()
        malloc_trim()
        return
    job.run = run
    job.done = done
    if not thread_pool_submit(thread_pool, job, OWN):
        free(job)
