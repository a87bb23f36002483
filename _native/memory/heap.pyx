"""Free pages of the C library's heap, which it hardly ever returns to the system by itself.

Connections that have ended, and small blocks, leave such pages. Returning them takes the locks of the heap, so it is
done only when many bytes were free for some time.
"""

from libc.stdint cimport int64_t

cdef extern from *:
    """
    #include <malloc.h>
    #include <stdint.h>
    /* free bytes in the heaps; -1: not known */
    static inline int64_t inferd_heap_free(void) {
    #if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
        return (int64_t)mallinfo2().fordblks;
    #else
        return -1;
    #endif
    }
    static inline void inferd_heap_trim(void) {
    #if defined(__GLIBC__)
        malloc_trim(0);
    #endif
    }
    """
    int64_t heap_free "inferd_heap_free"() noexcept nogil
    void trim_heap "inferd_heap_trim"() noexcept nogil

cdef enum:
    LOOKS = 3                # bytes that were free at the last LOOKS calls are idle
    SLACK = 8 << 20          # the heap is trimmed again when the idle bytes have grown by this since the last trim

cdef int64_t looks = 0       # calls of heap_cool
cdef int64_t idle[LOOKS]     # free bytes at the last calls
cdef int64_t before = 0      # the fewest free bytes since the last trim


cdef int64_t heap_cool() noexcept nogil:
    cdef int64_t least
    cdef int i
    global before, looks
    idle[looks % LOOKS] = heap_free()
    before = min(before, idle[looks % LOOKS])
    looks += 1
    least = idle[0]
    for i in range(1, LOOKS):
        least = min(least, idle[i])
    if least - before < SLACK:
        return 0
    trim_heap()
    before = heap_free()
    return max(0, least - before)
