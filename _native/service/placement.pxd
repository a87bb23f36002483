# Tensors of requests that lie in shared memory of clients: finding them, and putting results there.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from _native.memory.resource cimport Block
from _native.memory.shm cimport Placement, Registry
from _native.protobuf.codec cimport InputHead, OutputHead
from _native.request.request cimport Request, Response

cdef struct RegionAccess:
    # what requests may do with regions
    Registry *registry       # NULL: there are none
    bint shared              # every caller may use every region; otherwise a user those of its own
    size_t max_copied        # bytes of one input that are copied out of a region; 0: any number

# Whether the parameters of a tensor speak of shared memory.
cdef bint is_placed(const Request *request, uint32_t first_parameter, uint32_t count) noexcept nogil
# Find the data of an input in a region. False: status and details are set.
cdef bint place_input(Request *request, const RegionAccess *access, const InputHead *head, int index) noexcept nogil
# Copy inputs that still lie on a device to the host's memory, but for those on `device` (-1: none is spared); with
# `in_place`, which says that they are to be read where they lie, also those there that a stranger may change. Waits for
# the copies, and may change the current context of the thread. False: status and details are set.
cdef bint inputs_fetch(Request *request, int device, bint in_place) noexcept nogil
# Have an output written to a region. False: status and details are set.
cdef bint place_output(Request *request, const RegionAccess *access, const OutputHead *head, int index) noexcept nogil
# Where a model may put this output of a request directly, `size` bytes, and the block that holds it; NULL: nowhere, the
# output is copied when the response is complete.
cdef uint8_t *place_of_output(const Request *request, uint32_t output, size_t size, Block **block) noexcept nogil
# The same on a device, whatever the size; NULL: the output does not go to a region there.
cdef const Placement *placement_of_output(const Request *request, uint32_t output, int device) noexcept nogil
# Whether an input of the request lies in this memory of a device.
cdef bint is_input_on_device(const Request *request, uint64_t address, size_t size) noexcept nogil
# Whether this memory is in one of the regions that the request uses: a model may have returned an input as it is.
cdef bint is_in_region(const Request *request, const uint8_t *data) noexcept nogil
# For a response whose outputs are there: write those that go to regions, and copy the others out of shared memory.
# Afterwards nothing in the response is shared. False: the response has failed.
cdef bint response_place(Response *response) noexcept nogil
