# Memory that a worker may use while it executes, for outputs or beside the inputs, and what it sends in it.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from _native.execution.batch cimport NativeBatch
from _native.memory.resource cimport Block
from backends.python._channel cimport Channel
from backends.python._loans cimport LoanKind
from backends.python._wire cimport Head

# A copy of a record that the worker cannot change any more; NULL: there is no memory.
cdef Block *record_copy(const uint8_t *record, uint32_t size) noexcept nogil

# A block of the arena of so many bytes, which is lent and belongs to the ledger; NULL: there is no memory, or the
# worker has as many of this kind as it may.
cdef Block *lend(Channel *channel, LoanKind kind, uint64_t size) noexcept nogil
# A private copy of the record of a packet that lies in memory lent in this way. NULL: it does not, which breaks a rule,
# or there is no memory; the worker is ended then.
cdef Block *lent_record(Channel *channel, LoanKind kind, const Head *head) noexcept nogil

# All below are for whoever uses the work socket.

# So many bytes of the arena, until grants_end; NULL as for lend.
cdef Block *grant(Channel *channel, uint64_t size) noexcept nogil
cdef void grants_end(Channel *channel) noexcept nogil
# The grant for outputs that comes with an EXECUTE, as large as it is usually needed; NULL: none is.
cdef Block *grant_outputs(Channel *channel, const NativeBatch *batch) noexcept nogil
# This batch has its outputs: how much memory they needed.
cdef void grants_learn(Channel *channel, const NativeBatch *batch) noexcept nogil
# Answer an ALLOCATE. False: the worker is gone, or will be, as it does not read what it gets.
cdef bint grant_asked(Channel *channel, const Head *asked) noexcept nogil
# A private copy of the record of a packet that lies in `channel.packet` or in a grant. NULL as for lent_record.
cdef Block *granted_record(Channel *channel, const Head *head) noexcept nogil
