# Memory of Python objects that requests and responses hold: released with the GIL, which not every holder of the last
# reference may wait for.

cdef struct Owned:
    # the first member of a structure that is given to block_wrap as owner, with owned_release
    Owned *next
    void (*let_go)(Owned *owned) noexcept   # with the GIL; frees the structure

# For block_wrap. A thread with the GIL lets go at once, every other leaves that to `owned_drain`; but it waits for the
# GIL while nobody has promised to drain.
cdef void owned_release(void *owner) noexcept nogil
# From now on (False: no more) somebody calls `owned_drain` soon after `owned_waits` has become True.
cdef void owned_promise(bint drained) noexcept nogil
cdef bint owned_waits() noexcept nogil
# With the GIL: let go of what waits.
cdef void owned_drain() noexcept
