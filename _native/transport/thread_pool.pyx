"""The thread pool: threads that compress and inflate large messages, which would keep an I/O thread too long.

Jobs run without the GIL, a slice at a time, by the turns of their clients. Finished ones wait in a list, and an eventfd
signals the front, which calls their `done`. The threads have a higher nice value than the rest of the process: when
cores are scarce, the front and instances go first.
"""

from libc.stdint cimport uint64_t
from posix.unistd cimport close, read, write

from inferd._native.shares cimport (
    shares_begin,
    shares_charge,
    shares_end,
    shares_leave,
    shares_put,
    shares_put_back,
    shares_take,
)
from inferd._native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    notify_one,
    thread_name,
    unlock,
    wait,
)

import contextlib
import os
import threading

NICER = 10


cdef bint thread_pool_submit(ThreadPool *thread_pool, Job *job, uint64_t client) noexcept nogil:
    cdef bint taken
    lock(&thread_pool.guard)
    taken = shares_put(&thread_pool.shares, &job.waiting, client)
    job.waits = taken
    if taken:
        notify_one(&thread_pool.work)
    unlock(&thread_pool.guard)
    return taken


cdef bint thread_pool_withdraw(ThreadPool *thread_pool, Job *job) noexcept nogil:
    cdef bint waited
    lock(&thread_pool.guard)
    waited = job.waits
    if waited:
        shares_leave(&thread_pool.shares, &job.waiting)
        job.waits = False
        forget_growth(thread_pool, job)
    unlock(&thread_pool.guard)
    return waited


cdef void forget_growth(ThreadPool *thread_pool, Job *job) noexcept nogil:
    cdef Job **place = &thread_pool.grown
    while job.telling:
        if place[0] == job:
            place[0] = job.grown
            job.telling = False
        else:
            place = &place[0].grown


cdef Job *take(ThreadPool *thread_pool) noexcept nogil:
    # the next job, NULL when the pool is closing
    cdef Job *job = NULL
    lock(&thread_pool.guard)
    while not thread_pool.closing:
        job = <Job *>shares_take(&thread_pool.shares)
        if job != NULL:
            job.waits = False
            break
        wait(&thread_pool.work, &thread_pool.guard)
    unlock(&thread_pool.guard)
    return job


cdef void give_back(ThreadPool *thread_pool, Job *job, uint64_t cost) noexcept nogil:
    # the thread has done a slice of it, or all
    cdef uint64_t one = 1
    cdef bint alone = False
    lock(&thread_pool.guard)
    shares_charge(&thread_pool.shares, &job.waiting, cost)
    if job.whole:
        shares_leave(&thread_pool.shares, &job.waiting)
        alone = finish(thread_pool, job)
    else:
        shares_put_back(&thread_pool.shares, &job.waiting)
        job.waits = True  # this thread takes work again itself, so no other need be woken
        if job.grew != NULL and job.output != job.told:
            alone = tell(thread_pool, job)
    unlock(&thread_pool.guard)
    if alone:
        write(thread_pool.event_fd, &one, sizeof(one))


cdef inline bint is_signalled(const ThreadPool *thread_pool) noexcept nogil:
    return thread_pool.finished != NULL or thread_pool.grown != NULL


cdef bint tell(ThreadPool *thread_pool, Job *job) noexcept nogil:
    # tell the front of the output of a job that goes on; returns whether the front must be signalled
    cdef bint alone = not is_signalled(thread_pool)
    job.told = job.output
    if not job.telling:
        job.telling = True
        job.grown = thread_pool.grown
        thread_pool.grown = job
    return alone


cdef inline bint finish(ThreadPool *thread_pool, Job *job) noexcept nogil:
    # tell the front that a job is done; returns whether the front must be signalled
    cdef bint alone = not is_signalled(thread_pool)
    job.following = thread_pool.finished
    thread_pool.finished = job
    return alone


cdef void thread_pool_drain(ThreadPool *thread_pool) noexcept nogil:
    cdef uint64_t count
    cdef Job *job
    cdef Job *following
    cdef Job *first = NULL
    read(thread_pool.event_fd, &count, sizeof(count))
    lock(&thread_pool.guard)
    job = thread_pool.finished
    thread_pool.finished = NULL
    while thread_pool.grown != NULL:
        following = thread_pool.grown
        thread_pool.grown = following.grown
        following.telling = False
        following.grew(following)
    unlock(&thread_pool.guard)
    while job != NULL:  # in the order of completion
        following = job.following
        job.following = first
        first = job
        job = following
    while first != NULL:
        following = first.following
        first.done(first)
        first = following


cdef class PoolThreads:
    """Threads for the jobs of one front.

    When `event_fd` is readable, the I/O thread, or the event loop if there is none, drains the pool.

    Args:
        threads: how many; they run from `start` to `close`.
    """

    def __cinit__(self, threads: int):
        self.thread_pool.event_fd = -1
        mutex_init(&self.thread_pool.guard, NULL)
        condition_init(&self.thread_pool.work)
        if not shares_begin(&self.thread_pool.shares):
            raise MemoryError
        self.event_fd = self.thread_pool.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.threads = [
            threading.Thread(target=self._run, name=f"pool_{index}", daemon=True) for index in range(threads)
        ]

    def __dealloc__(self):
        if self.thread_pool.event_fd >= 0:
            close(self.thread_pool.event_fd)
        shares_end(&self.thread_pool.shares)
        condition_destroy(&self.thread_pool.work)
        mutex_destroy(&self.thread_pool.guard)

    def start(self) -> None:
        """Start the threads, unless they have been started."""
        for thread in self.threads:
            if thread.ident is None:
                thread.start()

    def _run(self) -> None:
        thread_name(b"inferd-pool")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICER)
        with nogil:
            self.work()

    cdef void work(self) noexcept nogil:
        cdef Job *job = take(&self.thread_pool)
        while job != NULL:
            give_back(&self.thread_pool, job, job.run(job))
            job = take(&self.thread_pool)

    def close(self) -> None:
        """End the threads. Waiting jobs are not run, but `done` is called for each job."""
        cdef Job *job
        with nogil:
            lock(&self.thread_pool.guard)
            self.thread_pool.closing = True
            notify_all(&self.thread_pool.work)
            unlock(&self.thread_pool.guard)
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        self.threads.clear()
        job = <Job *>shares_take(&self.thread_pool.shares)
        while job != NULL:
            job.waits = False
            shares_leave(&self.thread_pool.shares, &job.waiting)
            finish(&self.thread_pool, job)
            job = <Job *>shares_take(&self.thread_pool.shares)
        thread_pool_drain(&self.thread_pool)
