# What the parameters of a request say to the server.

from _native.protobuf.codec cimport Str
from _native.request.request cimport Request

# Take them from the decoded message. Of those with the same key the last one counts, so an earlier one may be wrong.
# False: status and details are set.
cdef bint take_parameters(Request *request) noexcept nogil
# The same for what they say of the sequence: what is wrong, the next take_parameters says.
cdef void take_correlation(Request *request) noexcept nogil
# Fail the request: the value of this parameter has the wrong type. Returns False.
cdef bint wrong_parameter(Request *request, Str key, const char *expected) noexcept nogil
