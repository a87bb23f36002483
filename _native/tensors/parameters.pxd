# The parameters of a request that the server itself interprets.

from inferd._native.protobuf.codec cimport Str
from inferd._native.request.request cimport Request

# Read the parameters from the decoded message. Of several with the same key the last one counts, and the others may be
# malformed. False: status and details are set.
cdef bint take_parameters(Request *request) noexcept nogil
# Read only the parameters of the sequence; the next take_parameters reports errors in them.
cdef void take_correlation(Request *request) noexcept nogil
# Fail the request because the value of this parameter has the wrong type. Returns False.
cdef bint wrong_parameter(Request *request, Str key, const char *expected) noexcept nogil
