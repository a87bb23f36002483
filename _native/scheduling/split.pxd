# Splits requests with more rows than the model takes at once.

from inferd._native.request.request cimport Request

# Split a bound request: the parts, a chain by Request.next, each to be pushed. The request waits for them. NULL: no
# memory; the request still belongs to the caller.
cdef Request *split_enter(Request *request) noexcept nogil
# The lane has refused the first part, and no other has been pushed: the whole request carries the error, and belongs to
# the caller again.
cdef void split_refused(Request *whole, Request *first) noexcept nogil
