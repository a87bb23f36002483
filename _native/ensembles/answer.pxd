# What an ensemble answers.

from _native.ensembles.frame cimport Frame, Run
from _native.request.request cimport Response

# Fill the response of the run that the frame stands for. False: the response carries an error.
cdef bint ensemble_answer(Response *response, const Run *run, Frame *frame) noexcept nogil
