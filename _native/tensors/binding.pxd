# Turns the bytes of a message into a request that its model can execute.

from libc.stdint cimport uint8_t

from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport Request
from inferd._native.request.signature cimport Signature
from inferd._native.tensors.placement cimport RegionAccess

# Decode `size` bytes at `data` in `block`, whose reference the request gets in any case. False: status and details are
# set.
cdef bint request_decode(Request *request, Block *block, const uint8_t *data, size_t size) noexcept nogil
# Read the sequence of the request from its parameters; request_bind reports errors in them.
cdef void request_identify(Request *request) noexcept nogil
# Check the decoded message against a signature, and set inputs, outputs, placements and rows. False: status and details
# are set.
cdef bint request_bind(Request *request, const Signature *signature, const RegionAccess *regions) noexcept nogil
# Check a request that the server itself makes, and set its rows. The caller has called request_reserve, and has set
# data, size, shape and rank of the present inputs. False: status and details are set.
cdef bint request_check(Request *request) noexcept nogil
