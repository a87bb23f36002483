# The response of an ensemble.

from inferd._native.ensembles.frame cimport Frame, Run
from inferd._native.request.request cimport Response

# Set the response of the run that the frame stands for. False: the response has an error.
cdef bint ensemble_answer(Response *response, const Run *run, Frame *frame) noexcept nogil
