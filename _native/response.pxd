# Bringing the outputs that a model has set into the form in which they leave.

from _native.request cimport Response

# Every wanted output is there, and in the form that the client asked for; only steps of ensembles may lack some. False:
# the response carries the error.
cdef bint response_complete(Response *response) noexcept nogil
