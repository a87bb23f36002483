# Grants: memory that a worker may use while it executes, for outputs or in addition to the inputs.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.resource cimport Block
from inferd.backends.python._channel cimport Channel
from inferd.backends.python._loans cimport LoanKind
from inferd.backends.python._wire cimport Head

# A copy of a record that the worker cannot change; NULL: no memory.
cdef Block *record_copy(const uint8_t *record, uint32_t size) noexcept nogil

# Lend a block of the arena, and note it as a loan; NULL: no memory, or the worker has the maximum of loans of this
# kind.
cdef Block *lend(Channel *channel, LoanKind kind, uint64_t size) noexcept nogil
# The head of the packet that gives a worker this block, the reply to an ALLOCATE with this id. NULL: no memory.
cdef Head allocated(const Channel *channel, uint64_t id, const Block *block) noexcept nogil
# A private copy of the record of a packet in memory that was lent in this way. NULL: the record is elsewhere, which
# breaks a rule, or there is no memory; the worker is then ended.
cdef Block *lent_record(Channel *channel, LoanKind kind, const Head *head) noexcept nogil

# All below are for the user of the work socket.

# So many bytes of the arena, until grants_end; NULL as for lend.
cdef Block *grant(Channel *channel, uint64_t size) noexcept nogil
cdef void grants_end(Channel *channel) noexcept nogil
# The grant for outputs that is sent with an EXECUTE, of the usual size; NULL: none.
cdef Block *grant_outputs(Channel *channel, const NativeBatch *batch) noexcept nogil
# Learn from the outputs of this batch how much memory they need.
cdef void grants_learn(Channel *channel, const NativeBatch *batch) noexcept nogil
# Reply to an ALLOCATE. False: the worker has ended, or will be ended because it does not read.
cdef bint grant_asked(Channel *channel, const Head *asked) noexcept nogil
# A private copy of the record of a packet in `channel.packet` or in a grant. NULL as for lent_record.
cdef Block *granted_record(Channel *channel, const Head *head) noexcept nogil
