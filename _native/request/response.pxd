# Bringing the outputs that a model has set into the form in which they leave.

from libc.stdint cimport uint32_t

from _native.request.request cimport Response

# Every wanted output is there, and in the form that the client asked for; only steps of ensembles may lack some. False:
# the response carries the error.
cdef bint response_complete(Response *response) noexcept nogil

# Fail it because the model has not set this output.
cdef void response_lacks(Response *response, uint32_t output) noexcept nogil
