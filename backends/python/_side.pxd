# What a worker sends on its side socket and needs no Python.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from _native.memory.resource cimport Block
from backends.python._channel cimport Channel
from backends.python._wire cimport Head

# Deal with a packet; False: it is not one of those. From the attendant's thread.
cdef bint side_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil
# A private copy of a record that lies in a grant, which ends with that; NULL: it lies elsewhere, or there is no memory.
cdef Block *side_record(Channel *channel, const Head *head) noexcept nogil
