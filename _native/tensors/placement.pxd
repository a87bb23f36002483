# Tensors of requests in the shared memory of clients: finding them, and writing results to it.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.memory.registry cimport Registry
from inferd._native.memory.shm cimport Placement
from inferd._native.protobuf.codec cimport InputHead, OutputHead
from inferd._native.request.request cimport Request, Response

cdef struct RegionAccess:
    # how requests may use regions
    Registry *registry       # NULL: there are none
    bint shared              # every caller may use every region; otherwise a user may use only its own
    size_t max_copied        # limit of the bytes of one input that are copied out of a region

# Whether the parameters of a tensor refer to shared memory.
cdef bint is_placed(const Request *request, uint32_t first_parameter, uint32_t count) noexcept nogil
# Find the data of an input in a region. False: status and details are set.
cdef bint place_input(Request *request, const RegionAccess *access, const InputHead *head, int index) noexcept nogil
# Copy inputs that are still on a device to host memory, except those on `device` (-1: no exception). With `in_place`
# the exceptions are read in place, so those that an untrusted client may change are copied, too. Waits for the copies,
# and may change the thread's current context. False: status and details are set.
cdef bint inputs_fetch(Request *request, int device, bint in_place) noexcept nogil
# Note that an output is to be written to a region. False: status and details are set.
cdef bint place_output(Request *request, const RegionAccess *access, const OutputHead *head, int index) noexcept nogil
# The address at which a model may write this output of a request directly, `size` bytes, and the block that contains
# it. NULL: none; the output is copied when the response is complete.
cdef uint8_t *place_of_output(const Request *request, uint32_t output, size_t size, Block **block) noexcept nogil
# The placement of an output that is to be written to a region on this device; NULL: it is not. The placement may be
# smaller than the output.
cdef const Placement *placement_of_output(const Request *request, uint32_t output, int device) noexcept nogil
# Whether an input of the request is at this address of a device.
cdef bint is_input_on_device(const Request *request, uint64_t address, size_t size) noexcept nogil
# Whether this memory is in a system region of the request, because a model has returned an input unchanged.
cdef bint is_in_region(const Request *request, const uint8_t *data) noexcept nogil
# For a response with its outputs: write those that go to regions, and copy the others out of shared memory.
# Afterwards nothing in the response is shared. False: the response has failed.
cdef bint response_place(Response *response) noexcept nogil
