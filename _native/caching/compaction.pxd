# Requests that the response cache keeps with their responses.

from inferd._native.request.request cimport Request

# Reduce an executed request to what its cache key and its response need. With `compares` large inputs are kept. False:
# no memory; the request is still valid.
cdef bint work_compact(Request *work, bint compares) noexcept nogil
# The bytes of memory that it then takes.
cdef size_t work_held(const Request *work, bint compares) noexcept nogil
