# Shared memory regions of clients on a GPU.

from libc.stdint cimport uint8_t

from inferd._native.memory.registry cimport Region

# Copy out of or into a part of a CUDA region that region_refusal has accepted, and wait for the copy. False: the device
# failed. Any thread may call it.
cdef bint cuda_region_read(const Region *region, size_t offset, void *to, size_t size) noexcept nogil
cdef bint cuda_region_write(const Region *region, size_t offset, const void *data, size_t size) noexcept nogil
# The IPC_HANDLE_SIZE bytes with which another process opens the memory of a CUDA region.
cdef const uint8_t *cuda_region_handle(const Region *region) noexcept nogil
