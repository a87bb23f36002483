# A library that AOTInductor compiled, prepared for one configuration and batches on the CPU.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.request.signature cimport MAX_RANK
from inferd.backends.pytorch._shim cimport Handle

cdef enum:
    NOWHERE = 0xffffffff     # a result that the configuration does not name

ctypedef int32_t (*run_fn)(void *container, Handle *inputs, size_t input_count, Handle *outputs, size_t output_count,
                           void *stream, void *proxy_executor) noexcept nogil

cdef struct Dim:
    int64_t lowest
    int64_t highest
    int32_t symbol           # dimensions with the same symbol vary together; -1: no symbol
    int64_t factor           # the dimension is factor * symbol + offset
    int64_t offset

cdef struct Argument:
    uint32_t input           # of the signature
    bint checked
    uint32_t rank
    Dim dims[MAX_RANK]

cdef struct Program:
    # a library, and how to call it for one configuration
    void *container
    run_fn run
    int32_t (*last_error)(const char **text) noexcept nogil    # NULL: the library is too old to have it
    Argument *arguments
    uint32_t argument_count
    uint32_t *results        # of each output of the library: index of the output in the signature, or NOWHERE
    uint32_t result_count
    int64_t *symbols         # room for their values in one batch
    uint32_t symbol_count
    Handle *inputs           # room for the handles of one batch
    Handle *outputs

# An execute_fn, whose context is the Program.
cdef void execute_program(NativeBatch *batch, void *context) noexcept nogil
# Why the last call on this thread failed.
cdef const char *reason(const Program *program) noexcept nogil
