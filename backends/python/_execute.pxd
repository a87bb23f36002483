# EXECUTE and DONE.

from _native.memory.resource cimport Block
from backends.python._channel cimport Channel
from backends.python._wire cimport Head

# The capsules for NativeInstance.executor and NativeInstance.gate.
cdef object make_executor(Channel *channel)
cdef object make_gate(Channel *channel)

# The work socket while no instance uses it: an ALLOCATE is answered; a private copy of the record of a packet that lies
# in `channel.packet` or, as an answer to such, in the arena (NULL: it is not where it may be, or there is no memory);
# and what was allocated ends.
cdef void answer_allocate(Channel *channel, const Head *asked) noexcept nogil
cdef Block *record_of(Channel *channel, const Head *head) noexcept nogil
cdef void end_grants(Channel *channel) noexcept nogil
