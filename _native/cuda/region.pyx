"""Shared memory regions of clients on a GPU: opened once, read and written by copies, and closed after the last user.

The thread of `inferd._native.cuda.closing` closes them, because the last user may be an I/O thread, and the driver may
wait for the device. A region has a stream of its own. Client and server share no CUDA events: the client finishes
writing before it sends a request, and the server before it responds. So each function here returns when its copy is
complete.
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from inferd._native.cuda.closing cimport Closing, close_later, closing_start
from inferd._native.cuda.device cimport Device, context_enter, context_leave, device_of
from inferd._native.cuda.driver cimport (
    CUDA_OK,
    IPC_HANDLE_SIZE,
    IPC_LAZY_ENABLE_PEER_ACCESS,
    STREAM_NON_BLOCKING,
    Context,
    CudaDevice,
    DevicePointer,
    IpcHandle,
    Result,
    StreamHandle,
    check,
    cuda,
)
from inferd._native.memory.resource cimport SHARED_WITH_FRIEND, SHARED_WITH_STRANGER, block_give
from inferd._native.memory.registry cimport REGION_CUDA, Region
from inferd._native.memory.shm cimport Regions, region_new

cdef struct Opened:
    # the resources of a region, with a reference of its own to the context: the region may outlive all other users
    CudaDevice device
    Context context
    DevicePointer address
    StreamHandle stream
    IpcHandle handle
    Closing closing


cdef void close_opened(void *argument) noexcept nogil:
    cdef Opened *opened = <Opened *>argument
    cdef Context before
    if opened.context != NULL and context_enter(opened.context, &before) == CUDA_OK:
        if opened.stream != NULL:
            cuda.stream_destroy(opened.stream)
        if opened.address:
            cuda.ipc_close(opened.address)
        context_leave(before)
    if opened.context != NULL:
        cuda.primary_context_release(opened.device)
    free(opened)


cdef void close_region(Region *region) noexcept nogil:
    close_soon(<Opened *>region.handle)


cdef void close_soon(Opened *opened) noexcept nogil:
    opened.closing.close = close_opened
    opened.closing.argument = opened
    close_later(&opened.closing)


cdef bint cuda_region_read(const Region *region, size_t offset, void *to, size_t size) noexcept nogil:
    cdef const Opened *opened = <const Opened *>region.handle
    cdef Context before
    cdef bint good
    if context_enter(opened.context, &before) != CUDA_OK:
        return False
    good = (cuda.copy_to_host(to, region.address + offset, size, opened.stream) == CUDA_OK
            and cuda.stream_synchronize(opened.stream) == CUDA_OK)
    context_leave(before)
    return good


cdef bint cuda_region_write(const Region *region, size_t offset, const void *data, size_t size) noexcept nogil:
    cdef const Opened *opened = <const Opened *>region.handle
    cdef Context before
    cdef bint good
    if context_enter(opened.context, &before) != CUDA_OK:
        return False
    good = (cuda.copy_to_device(region.address + offset, data, size, opened.stream) == CUDA_OK
            and cuda.stream_synchronize(opened.stream) == CUDA_OK)
    context_leave(before)
    return good


cdef const uint8_t *cuda_region_handle(const Region *region) noexcept nogil:
    return <const uint8_t *>(<const Opened *>region.handle).handle.reserved


cdef int open_memory(Opened *opened, Device device, bytes handle, size_t *room) except -1:
    # `room`: bytes from where the handle points to the end of its allocation
    cdef DevicePointer base = 0
    cdef size_t size = 0
    cdef Context before
    cdef Result result
    cdef const char *call = "cuCtxSetCurrent"
    memcpy(opened.handle.reserved, <const char *>handle, IPC_HANDLE_SIZE)
    opened.device = device.device
    check(cuda.primary_context_retain(&opened.context, opened.device), "cuDevicePrimaryCtxRetain")
    with nogil:
        result = context_enter(opened.context, &before)
        if result == CUDA_OK:
            call = "cuIpcOpenMemHandle_v2"
            result = cuda.ipc_open(&opened.address, opened.handle, IPC_LAZY_ENABLE_PEER_ACCESS)
            if result == CUDA_OK:
                call = "cuMemGetAddressRange_v2"
                result = cuda.address_range(&base, &size, opened.address)
            if result == CUDA_OK:
                call = "cuStreamCreateWithPriority"
                result = cuda.stream_create(&opened.stream, STREAM_NON_BLOCKING, 0)
            context_leave(before)
    check(result, call)
    room[0] = size - <size_t>(opened.address - base)
    return 0


def add_cuda(regions: Regions, scope: int, name: str, handle: bytes, device: int, byte_size: int, *, trusted: bool,
             owner: int = 0) -> None:
    """Register memory that a client has exported, like `Regions.add_system`.

    Args:
        regions: where to register it.
        scope: the user whose region it is, or SHARED.
        name: of the region, in this scope.
        handle: a cudaIpcMemHandle_t.
        device: the device of the memory, by the server's numbers.
        byte_size: of the region, from where the handle points.
        trusted: a model may work on it in place; otherwise it works on copies.
        owner: `Regions.remove_owned` with this number unregisters the region; 0: no owner.

    Raises:
        ValueError: the handle has another length, or its memory fewer bytes.
        CudaError: the driver does not open it.
        RegionError: the name is taken, or a bound is reached.
    """
    cdef Regions registry = regions
    cdef Region *region
    cdef Opened *opened
    cdef size_t room = 0
    if len(handle) != IPC_HANDLE_SIZE:
        raise ValueError(f"expected a handle of {IPC_HANDLE_SIZE} bytes, got {len(handle)}")
    closing_start()
    opened = <Opened *>calloc(1, sizeof(Opened))
    if opened == NULL:
        raise MemoryError
    try:
        open_memory(opened, device_of(device), handle, &room)
        if not 0 < byte_size <= room:
            raise ValueError(f"expected 1 to {room} bytes, which is the size of the memory, got {byte_size}")
        region = region_new(REGION_CUDA, scope, name.encode(), b"", NULL, byte_size)
        if region == NULL:
            raise MemoryError
    except BaseException:
        close_soon(opened)
        raise
    region.close = close_region
    region.handle = opened
    region.device = device
    region.address = opened.address
    region.writable = True
    region.block.sharing = SHARED_WITH_FRIEND if trusted else SHARED_WITH_STRANGER
    region.owner = owner
    try:
        registry.enter(region)
    finally:
        block_give(region.block)
