# The recorder of a server, for Python.

from inferd._native.request.record cimport Recorder, Sampling


cdef class RecorderHandle:
    # a Recorder for Python
    cdef Recorder recorder
    cdef list own            # the SamplingHandle of each model that has or had a sampling of its own


cdef class SamplingHandle:
    cdef Sampling sampling
