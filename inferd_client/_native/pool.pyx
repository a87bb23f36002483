"""Memory of large messages, used again, by all connections of the process."""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc

from inferd_client._native.linux cimport pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock

cdef enum:
    PLACES = 16
    LARGE = 1 << 16          # smaller ones are malloc's
    MOST = 1 << 26           # bytes that are kept

cdef struct Place:
    uint8_t *data
    size_t capacity

cdef struct Pool:
    pthread_mutex_t lock
    Place places[PLACES]
    size_t kept              # bytes

cdef Pool pool
pthread_mutex_init(&pool.lock, NULL)


cdef uint8_t *pool_take(size_t size, size_t *capacity) noexcept nogil:
    cdef uint8_t *found = NULL
    cdef Place *place
    cdef int i
    capacity[0] = size
    if size >= LARGE:
        capacity[0] = (size + LARGE - 1) // LARGE * LARGE
        pthread_mutex_lock(&pool.lock)
        for i in range(PLACES):
            place = &pool.places[i]
            if place.data != NULL and size <= place.capacity and place.capacity <= 2 * size:
                found = place.data
                capacity[0] = place.capacity
                pool.kept -= place.capacity
                place.data = NULL
                break
        pthread_mutex_unlock(&pool.lock)
    return found if found != NULL else <uint8_t *> malloc(capacity[0] + 1)


cdef void pool_give(uint8_t *data, size_t capacity) noexcept nogil:
    cdef Place *place
    cdef uint8_t *extra = data
    cdef int i
    if data != NULL and LARGE <= capacity <= MOST:
        pthread_mutex_lock(&pool.lock)
        for i in range(PLACES):
            place = &pool.places[i]
            if place.data == NULL and pool.kept + capacity <= MOST:
                place.data = data
                place.capacity = capacity
                pool.kept += capacity
                extra = NULL
                break
        pthread_mutex_unlock(&pool.lock)
    free(extra)
