# Memory of Python objects that requests and responses hold. To release it, a thread needs the GIL. The thread that
# gives back the last reference may be an I/O thread, which must not wait for the GIL.

cdef struct Owned:
    # The first member of a structure that block_wrap gets as `owner`, with owned_release as `release`.
    Owned *next
    void (*let_go)(Owned *owned) noexcept   # with the GIL; frees the structure

# The `release` of these blocks. A thread with the GIL lets go of the object at once. Another thread leaves that to
# `owned_drain` if somebody has promised to call it; else it waits for the GIL.
cdef void owned_release(void *owner) noexcept nogil
# From now on (False: no more) somebody calls `owned_drain` soon after `owned_waits` has become True.
cdef void owned_promise(bint drained) noexcept nogil
# Whether objects wait for `owned_drain`.
cdef bint owned_waits() noexcept nogil
# Drop the references to the objects that wait. The caller has the GIL.
cdef void owned_drain() noexcept
