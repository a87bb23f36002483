# Completes a response: brings the outputs that a model has set into the form in which they are sent.

from libc.stdint cimport uint32_t

from inferd._native.request.request cimport Response

# Check that every wanted output exists, and bring it into the form that the client asked for. Only steps of ensembles
# may lack outputs. False: the response carries the error.
cdef bint response_complete(Response *response) noexcept nogil

# Fail the response because the model has not set this output.
cdef void response_lacks(Response *response, uint32_t output) noexcept nogil
