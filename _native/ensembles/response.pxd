# The response of an ensemble.

from inferd._native.ensembles.frame cimport Frame, Run
from inferd._native.request.request cimport Response

# Fill the response of a run from the tensors of `frame`, which has the ensemble's outputs. False: it has an error.
cdef bint ensemble_response(Response *response, const Run *run, Frame *frame) noexcept nogil
