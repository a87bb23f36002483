# The recorder of a server, for Python.

from inferd._native.request.record cimport Recorder, Sampling


cdef class RecorderHandle:
    # a Recorder for Python
    cdef Recorder recorder
    cdef list own            # SamplingHandle of models that have or had their own


cdef class SamplingHandle:
    cdef Sampling sampling
