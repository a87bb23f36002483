# Tensors of requests that lie in shared memory of clients: finding them, and putting results there.

from libc.stdint cimport uint8_t, uint32_t

from _native.codec cimport InputHead, OutputHead
from _native.memory cimport Block
from _native.request cimport Request, Response
from _native.shm cimport Registry

cdef struct RegionAccess:
    # what requests may do with regions
    Registry *registry       # NULL: there are none
    bint shared              # every caller may use every region; otherwise a user those of its own
    size_t max_copied        # bytes of one input that are copied out of a region; 0: any number

# Whether the parameters of a tensor speak of shared memory.
cdef bint is_placed(const Request *request, uint32_t first_parameter, uint32_t count) noexcept nogil
# Find the data of an input in a region. False: status and details are set.
cdef bint place_input(Request *request, const RegionAccess *access, const InputHead *head, int index) noexcept nogil
# Have an output written to a region. False: status and details are set.
cdef bint place_output(Request *request, const RegionAccess *access, const OutputHead *head, int index) noexcept nogil
# Where a model may put this output of a request directly, `size` bytes, and the block that holds it; NULL: nowhere, the
# output is copied when the response is complete.
cdef uint8_t *place_of_output(const Request *request, uint32_t output, size_t size, Block **block) noexcept nogil
# Whether this memory is in one of the regions that the request uses: a model may have returned an input as it is.
cdef bint is_in_region(const Request *request, const uint8_t *data) noexcept nogil
# For a response whose outputs are there: write those that go to regions, and copy the others out of shared memory.
# Afterwards nothing in the response is shared. False: the response has failed.
cdef bint response_place(Response *response) noexcept nogil
