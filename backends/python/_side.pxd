# Packets of a worker on its side socket that need no Python.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from inferd._native.memory.resource cimport Block
from inferd.backends.python._channel cimport Channel
from inferd.backends.python._wire cimport Head

# On the attendant's thread: process a packet; False: it is another kind of packet.
cdef bint side_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil
# After packets were processed, and before anything that may take long: tell the front that responses have come.
cdef void side_signal(Channel *channel) noexcept nogil
# A private copy of a record in a grant, which then ends; NULL: the record is elsewhere, or there is no memory.
cdef Block *side_record(Channel *channel, const Head *head) noexcept nogil
