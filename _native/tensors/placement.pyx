"""Placement: tensors of a request in the shared memory of its client instead of in its message.

The rules and the beginnings of the texts are those of Triton ("ParseSharedMemoryParams" in grpc_utils.h, GetMemoryInfo
in shared_memory_manager.cc, ResponseAllocatorHelper in infer_handler.cc).
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcmp, memmove, strlen

from inferd._native.atomic cimport load32
from inferd._native.cuda.region cimport cuda_region_read, cuda_region_write
from inferd._native.memory.resource cimport (
    SHARED_WITH_NOBODY,
    SHARED_WITH_STRANGER,
    Block,
    block_give,
    block_own,
    block_replace,
    block_share,
    block_take,
)
from inferd._native.memory.registry cimport REGION_CUDA, REGION_SYSTEM, Region
from inferd._native.memory.shm cimport (
    SCOPE_NONE,
    SCOPE_SHARED,
    SHM_DISABLED,
    Placement,
    region_find,
    region_intact,
    region_refusal,
)
from inferd._native.protobuf.codec cimport (
    PARAMETER_INT64,
    PARAMETER_STRING,
    InputHead,
    OutputHead,
    Parameter,
    Str,
    parameter_find,
)
from inferd._native.protobuf.datatype cimport DT_BYTES
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport InputData, OutputData, Request, Response, request_fail, response_fail
from inferd._native.request.signature cimport TensorSignature
from inferd._native.status cimport (
    STATUS_INTERNAL,
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNIMPLEMENTED,
)
from inferd._native.text cimport clip, format_text


cdef bint is_placed(const Request *request, uint32_t first, uint32_t count) noexcept nogil:
    cdef Str key
    cdef uint32_t i
    for i in range(first, first + count):
        key = request.message.tensor_parameters[i].key
        if key.size > 14 and memcmp(key.data, "shared_memory_", 14) == 0:
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# What the parameters say

cdef struct Reference:
    # a part of a region as the parameters of a tensor name it
    Str region
    int64_t offset
    int64_t byte_size


cdef inline const Parameter *find(const Request *request, uint32_t first, uint32_t count,
                                  const char *key) noexcept nogil:
    return parameter_find(request.message.tensor_parameters + first, count, key, <uint32_t>strlen(key))


cdef bint wrong_kind(Request *request, Str tensor, const char *key, const char *expected) noexcept nogil:
    request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
        "invalid value type for '%s' parameter for tensor '%.*s', expected %s.", key, clip(tensor), tensor.data,
        expected))
    return False


cdef bint take_number(Request *request, Str tensor, uint32_t first, uint32_t count, const char *key, bint has_region,
                      int64_t *value, bint *given) noexcept nogil:
    cdef const Parameter *p = find(request, first, count, key)
    given[0] = p != NULL
    if p == NULL:
        return True
    if not has_region:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "'%s' can not be specified without 'shared_memory_region' parameter for tensor '%.*s'", key,
            clip(tensor), tensor.data))
        return False
    if p.kind != PARAMETER_INT64:
        return wrong_kind(request, tensor, key, "int64_param")
    value[0] = p.integer
    return True


cdef bint take_reference(Request *request, Str tensor, uint32_t first, uint32_t count,
                         Reference *out) noexcept nogil:
    cdef const Parameter *region = find(request, first, count, "shared_memory_region")
    cdef bint has_region = region != NULL
    cdef bint has_offset, has_size
    out.offset = 0
    if has_region and region.kind != PARAMETER_STRING:
        return wrong_kind(request, tensor, "shared_memory_region", "string_param")
    if not (take_number(request, tensor, first, count, "shared_memory_offset", has_region, &out.offset, &has_offset)
            and take_number(request, tensor, first, count, "shared_memory_byte_size", has_region, &out.byte_size,
                            &has_size)):
        return False
    if has_region and not has_size:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor '%.*s'",
            clip(tensor), tensor.data))
        return False
    if has_region:
        out.region = region.text
        return True
    request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
        "tensor '%.*s' has a parameter that begins with 'shared_memory_' and is not known", clip(tensor),
        tensor.data))
    return False


cdef inline int64_t scope_of(const Request *request, const RegionAccess *access) noexcept nogil:
    if access.registry == NULL:
        return SCOPE_NONE
    if access.shared:
        return SCOPE_SHARED
    return request.origin.user if request.origin.user >= 0 else <int64_t>SCOPE_NONE


cdef Placement *take_placement(Request *request, const RegionAccess *access, Str tensor, uint32_t first,
                               uint32_t count) noexcept nogil:
    # a new placement, the first of the request's; NULL: status and details are set
    cdef int64_t scope = scope_of(request, access)
    cdef Reference wanted
    cdef Region *region
    cdef char *refusal
    cdef Placement *placement
    if not take_reference(request, tensor, first, count, &wanted):
        return NULL
    if scope == SCOPE_NONE:
        request_fail(request, STATUS_UNIMPLEMENTED, format_text(
            "%s Tensor '%.*s' refers to a region.", SHM_DISABLED, clip(tensor), tensor.data))
        return NULL
    region = region_find(access.registry, scope, wanted.region)
    if region == NULL:
        request_fail(request, STATUS_NOT_FOUND, format_text(
            "Unable to find shared memory region: '%.*s'", clip(wanted.region), wanted.region.data))
        return NULL
    refusal = region_refusal(region, wanted.offset, wanted.byte_size)
    placement = <Placement *>calloc(1, sizeof(Placement)) if refusal == NULL else NULL
    if placement == NULL:
        block_give(region.block)
        request_fail(request, STATUS_INVALID_ARGUMENT, refusal)
        return NULL
    placement.region = region
    placement.offset = <size_t>wanted.offset
    placement.size = <size_t>wanted.byte_size
    placement.next = request.placements
    request.placements = placement
    return placement


# ---------------------------------------------------------------------------------------------------------------------
# Inputs

cdef bint place_input(Request *request, const RegionAccess *access, const InputHead *head, int index) noexcept nogil:
    cdef const TensorSignature *tensor = &request.signature.inputs[index]
    cdef InputData *input = &request.inputs[index]
    cdef Placement *placement = take_placement(request, access, head.name, head.first_parameter,
                                               head.parameter_count)
    if placement == NULL:
        return False
    if head.has_contents:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "unexpected 'content' provided when using shared memory for input tensor '%.*s' for model '%.*s'",
            tensor.name.size, tensor.name.data, request.signature.name.size, request.signature.name.data))
        return False
    if not may_be_copied(request, access, tensor, placement):
        return False
    if placement.region.kind == REGION_CUDA:
        input.block = block_share(placement.region.block)
        input.region = placement.region
        input.address = placement.region.address + placement.offset
        input.size = placement.size
        request.on_device = True
        return may_stay(request, tensor) or fetch_input(request, index)
    input.block = block_share(placement.region.block)
    input.data = placement.region.block.data + placement.offset
    input.size = placement.size
    # the lengths in a BYTES tensor are checked in a copy, which the client cannot change afterwards
    return tensor.datatype != DT_BYTES or own_strings(request, tensor, input, placement)


cdef bint may_be_copied(Request *request, const RegionAccess *access, const TensorSignature *tensor,
                        const Placement *placement) noexcept nogil:
    # By a short reference a client must not make the server use more memory than by the largest message.
    if (placement.size <= access.max_copied
            or (tensor.datatype != DT_BYTES and placement.region.kind == REGION_SYSTEM
                and placement.region.block.sharing != SHARED_WITH_STRANGER)):
        return True
    request_fail(request, STATUS_RESOURCE_EXHAUSTED, format_text(
        "input '%.*s' has %zu bytes in a region of shared memory, at most %zu are copied out of one", tensor.name.size,
        tensor.name.data, placement.size, access.max_copied))
    return False


cdef inline bint may_stay(const Request *request, const TensorSignature *tensor) noexcept nogil:
    # whether nobody reads the elements of the input before an instance has the request
    cdef const Lane *lane = <const Lane *>request.lane
    return (lane != NULL and lane.fetches_late and tensor.datatype != DT_BYTES and not tensor.padded
            and not tensor.values)


cdef bint fetch_input(Request *request, uint32_t index) noexcept nogil:
    # copy the input to host memory: the CPU cannot read memory of a GPU
    cdef InputData *input = &request.inputs[index]
    cdef const Region *region = input.region
    cdef Str name = request.signature.inputs[index].name
    cdef Block *block = block_take(input.size)
    if block == NULL:
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, format_text(
            "no memory for %zu bytes of input '%.*s'", input.size, name.size, name.data))
        return False
    if not cuda_region_read(region, input.address - region.address, block.data, input.size):
        block_give(block)
        request_fail(request, STATUS_INTERNAL, format_text(
            "input '%.*s' cannot be read from CUDA shared memory region '%.*s': device %d does not copy it", name.size,
            name.data, clip(region.name), region.name.data, region.device))
        return False
    input.region = NULL
    block_give(input.block)
    input.block = block
    input.data = block.data
    input.exclusive = True
    return True


cdef inline bint is_spared(const Region *region, int device, bint in_place) noexcept nogil:
    return region.device == device and not (in_place and region.block.sharing == SHARED_WITH_STRANGER)


cdef bint inputs_fetch(Request *request, int device, bint in_place) noexcept nogil:
    cdef uint32_t i
    for i in range(request.signature.input_count):
        if (request.inputs[i].present and request.inputs[i].region != NULL
                and not is_spared(request.inputs[i].region, device, in_place) and not fetch_input(request, i)):
            return False
    return True


cdef bint own_strings(Request *request, const TensorSignature *tensor, InputData *input,
                      const Placement *placement) noexcept nogil:
    if not block_own(&input.block, &input.data, input.size):
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, format_text(
            "no memory for %zu bytes of input '%.*s'", input.size, tensor.name.size, tensor.name.data))
        return False
    if not region_intact(placement.region):
        request_fail(request, STATUS_INVALID_ARGUMENT, shortened_text(placement))
        return False
    return True


cdef char *shortened_text(const Placement *placement) noexcept nogil:
    cdef Str name = placement.region.name
    return format_text(
        "the object of shared memory region '%.*s' has been shortened since it was registered, or the system has no "
        "memory for it: register it again",
        clip(name), name.data)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs

cdef bint place_output(Request *request, const RegionAccess *access, const OutputHead *head, int index) noexcept nogil:
    cdef Placement *placement = take_placement(request, access, head.name, head.first_parameter,
                                               head.parameter_count)
    if placement == NULL:
        return False
    placement.output = True
    placement.tensor = <uint32_t>index
    if find(request, head.first_parameter, head.parameter_count, "classification") != NULL:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "output can't set both 'shared_memory_region' and 'classification'"))
        return False
    if not placement.region.writable:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "output '%.*s' cannot be written to shared memory region '%.*s': the server may only read its object",
            clip(head.name), head.name.data, clip(placement.region.name), placement.region.name.data))
        return False
    return True


cdef uint8_t *place_of_output(const Request *request, uint32_t output, size_t size, Block **block) noexcept nogil:
    cdef const Placement *placement = request.placements
    while placement != NULL and not (placement.output and placement.tensor == output):
        placement = placement.next
    if (placement == NULL or placement.region.kind != REGION_SYSTEM
            or placement.region.block.sharing == SHARED_WITH_STRANGER or size > placement.size):
        return NULL
    block[0] = placement.region.block
    return placement.region.block.data + placement.offset


cdef const Placement *placement_of_output(const Request *request, uint32_t output, int device) noexcept nogil:
    cdef const Placement *placement = request.placements
    while placement != NULL and not (placement.output and placement.tensor == output):
        placement = placement.next
    if placement == NULL or placement.region.kind != REGION_CUDA or placement.region.device != device:
        return NULL
    return placement


cdef bint is_input_on_device(const Request *request, uint64_t address, size_t size) noexcept nogil:
    cdef const InputData *input
    cdef uint32_t i
    for i in range(request.signature.input_count):
        input = &request.inputs[i]
        if (input.present and input.region != NULL
                and address < input.address + input.size and input.address < address + size):
            return True
    return False


cdef bint is_in_region(const Request *request, const uint8_t *data) noexcept nogil:
    cdef const Placement *placement = request.placements
    while placement != NULL:
        if (placement.region.kind == REGION_SYSTEM
                and placement.region.block.data <= data < placement.region.block.data + placement.region.size):
            return True
        placement = placement.next
    return False


cdef bint write_output(Response *response, const Placement *placement) noexcept nogil:
    cdef OutputData *out = &response.outputs[placement.tensor]
    cdef Str name = response.request.signature.outputs[placement.tensor].name
    cdef uint8_t *to = placement.region.block.data + placement.offset
    if not out.wanted:
        return True  # an ensemble has no value for it
    if out.size > placement.size:
        response_fail(response, STATUS_INTERNAL, format_text(
            "shared memory size specified with the request for output '%.*s' (%zu bytes) should be at least %zu bytes "
            "to hold the results", name.size, name.data, placement.size, out.size))
        return False
    if out.placed:
        pass
    elif placement.region.kind == REGION_CUDA:
        if out.size and not cuda_region_write(placement.region, placement.offset, out.data, out.size):
            response_fail(response, STATUS_INTERNAL, format_text(
                "output '%.*s' cannot be written to CUDA shared memory region '%.*s': device %d does not copy it",
                name.size, name.data, clip(placement.region.name), placement.region.name.data,
                placement.region.device))
            return False
    elif out.size and out.data != to:
        memmove(to, out.data, out.size)  # the output may be an input in the same region
    out.data = NULL
    out.size = 0
    return True


cdef bint own_output(Response *response, uint32_t output) noexcept nogil:
    cdef OutputData *out = &response.outputs[output]
    if not out.wanted or out.size == 0:
        return True
    if out.block.sharing == SHARED_WITH_NOBODY and not is_in_region(response.request, out.data):
        return True
    if not block_replace(&out.block, &out.data, out.size):
        response_fail(response, STATUS_RESOURCE_EXHAUSTED, NULL)
        return False
    return True


cdef void forget_placed(Response *response) noexcept nogil:
    # drop the addresses of outputs that are already on a device: no one can use them any more
    cdef uint32_t i
    for i in range(response.request.signature.output_count):
        if response.outputs[i].placed:
            response.outputs[i].data = NULL
            response.outputs[i].size = 0


cdef bint response_place(Response *response) noexcept nogil:
    cdef const Request *request = response.request
    cdef const Placement *placement = request.placements
    cdef uint32_t i
    if load32(&request.abandonment.happened):
        forget_placed(response)
        return True  # the client has left, or may use its memory for another purpose by now
    while placement != NULL:
        if placement.output and not write_output(response, placement):
            return False
        placement = placement.next
    for i in range(request.signature.output_count):
        if not own_output(response, i):
            return False
    placement = request.placements
    while placement != NULL:
        if not region_intact(placement.region):
            response_fail(response, STATUS_INVALID_ARGUMENT, shortened_text(placement))
            return False
        placement = placement.next
    return True
