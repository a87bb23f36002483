"""Reused memory of large messages, for all connections of the process."""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc

from inferd_client._native.linux cimport pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*before)() noexcept nogil, void (*in_parent)() noexcept nogil,
                       void (*in_child)() noexcept nogil)

cdef enum:
    BUFFERS = 16
    LARGE = 1 << 16          # smaller ones are malloc's
    ALIGNMENT = 16           # malloc's
    MOST = 1 << 26           # bytes that are kept

cdef struct Buffer:
    uint8_t *data
    size_t capacity

cdef struct BufferPool:
    pthread_mutex_t lock
    Buffer buffers[BUFFERS]
    size_t kept              # bytes

cdef BufferPool pool


cdef void hold() noexcept nogil:
    pthread_mutex_lock(&pool.lock)


cdef void let_go() noexcept nogil:
    pthread_mutex_unlock(&pool.lock)


pthread_mutex_init(&pool.lock, NULL)
pthread_atfork(hold, let_go, let_go)  # in a child no thread would release a lock that another thread held


cdef inline size_t before(size_t size) noexcept nogil:
    """The number of bytes before a message in its memory."""
    return -size % ALIGNMENT


cdef uint8_t *pool_take(size_t size, size_t *capacity) noexcept nogil:
    cdef uint8_t *found = NULL
    cdef Buffer *buffer
    cdef int i
    capacity[0] = size
    if size >= LARGE:
        capacity[0] = (size + LARGE - 1) // LARGE * LARGE
        pthread_mutex_lock(&pool.lock)
        for i in range(BUFFERS):
            buffer = &pool.buffers[i]
            if buffer.data != NULL and size <= buffer.capacity and buffer.capacity <= 2 * size:
                found = buffer.data
                capacity[0] = buffer.capacity
                pool.kept -= buffer.capacity
                buffer.data = NULL
                break
        pthread_mutex_unlock(&pool.lock)
    if found == NULL:
        found = <uint8_t *> malloc(capacity[0] + ALIGNMENT)
    return found + before(size) if found != NULL else NULL


cdef void pool_give(uint8_t *data, size_t size, size_t capacity) noexcept nogil:
    cdef Buffer *buffer
    cdef uint8_t *extra = data - before(size) if data != NULL else NULL
    cdef int i
    if data != NULL and LARGE <= capacity <= MOST:
        pthread_mutex_lock(&pool.lock)
        for i in range(BUFFERS):
            buffer = &pool.buffers[i]
            if buffer.data == NULL and pool.kept + capacity <= MOST:
                buffer.data = extra
                buffer.capacity = capacity
                pool.kept += capacity
                extra = NULL
                break
        pthread_mutex_unlock(&pool.lock)
    free(extra)
