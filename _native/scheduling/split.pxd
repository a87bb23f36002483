# Splits requests with more rows than the model takes at once.

from _native.request.request cimport Request

# The parts of a bound request of a lane that splits: a chain by Request.next, each to be pushed. The request waits for
# them. NULL: no memory; the request still belongs to the caller.
cdef Request *split_enter(Request *request) noexcept nogil
