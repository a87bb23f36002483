# Memory that a worker may use while it executes, for outputs or beside the inputs, and what it sends in it.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from _native.execution.batch cimport NativeBatch
from _native.memory.resource cimport Block
from backends.python._channel cimport Channel
from backends.python._wire cimport Head

# Whether so many bytes at this offset of the arena, which a worker names, lie in a block that it was granted.
cdef inline bint grant_holds(const Channel *channel, const Block *block, uint64_t offset, uint32_t size) noexcept nogil:
    cdef uint64_t start = <uint64_t>(block.data - channel.arena.base)
    return start <= offset and offset - start < block.size and size <= block.size - (offset - start)

# A copy of a record that the worker cannot change any more; NULL: there is no memory.
cdef Block *record_copy(const uint8_t *record, uint32_t size) noexcept nogil

# All below are for whoever uses the work socket.

# So many bytes of the arena, until grants_end; NULL: there is no memory.
cdef Block *grant(Channel *channel, uint64_t size) noexcept nogil
cdef void grants_end(Channel *channel) noexcept nogil
# The grant for outputs that comes with an EXECUTE, as large as it is usually needed; NULL: none is.
cdef Block *grant_outputs(Channel *channel, const NativeBatch *batch) noexcept nogil
# This batch has its outputs: how much memory they needed.
cdef void grants_learn(Channel *channel, const NativeBatch *batch) noexcept nogil
# Answer an ALLOCATE. False: the worker is gone, or will be, as it does not read what it gets.
cdef bint grant_asked(Channel *channel, const Head *asked) noexcept nogil
# A private copy of the record of a packet that lies in `channel.packet` or in a grant. NULL: it is not where it may be,
# or there is no memory.
cdef Block *granted_record(Channel *channel, const Head *head) noexcept nogil
