# The lane of an ensemble: its requests are executed by other models, step by step.

from inferd._native.ensembles.run cimport Ensemble
from inferd._native.request.lane cimport LaneHandle


cdef class EnsembleLane(LaneHandle):
    cdef object service      # owns the submission
    cdef inline Ensemble *ensemble(self) noexcept:
        return <Ensemble *>self.lane
