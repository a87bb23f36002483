# CUDA graphs of a model's work, captured when the model is loaded.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.cuda.driver cimport DevicePointer
from inferd._native.gpu.bufferset cimport SETS, BufferSet, Pipeline
from inferd._native.gpu.transfer cimport Transfer
from inferd._native.request.signature cimport MAX_RANK, Signature

cdef enum:
    GRAPHS = 64              # for one model

cdef struct Dims:
    int64_t dims[MAX_RANK]   # of an input of the model, without the batch dimension

cdef struct Fitting:
    # the batches for which a graph can be used
    uint32_t rows            # that it computes
    uint32_t lowest          # least rows of a batch that is padded for it
    Dims *shapes             # of every input


cdef class Graphs:
    cdef Transfer transfer
    cdef Pipeline pipeline
    cdef const Signature *signature
    cdef uint32_t input_count
    cdef Fitting fitting[GRAPHS]     # by rows
    cdef int count
    cdef DevicePointer inputs[GRAPHS][SETS]
    cdef list captured               # of each graph: a Captured for each buffer set

    # Choose the graph for the batch in the set, which is described but not laid out. The graph determines where the
    # inputs are copied to. Returns the rows that the model then computes.
    cdef uint32_t choose(self, BufferSet *set) noexcept nogil
    # Launch the chosen graph.
    cdef int launch(self, BufferSet *set) except -1
    cdef int add(self, int rows, int lowest, shapes) except -1
    cdef object capture_one(self, instance, BufferSet *set)
    cdef int record(self, instance, BufferSet *set, list kept, object captured) except -1
    cdef size_t size_of(self, int index, uint32_t input) noexcept nogil
    cdef void assume_inputs(self, BufferSet *set) noexcept
    cdef bint fits(self, int index, const BufferSet *set) noexcept nogil
