# The functions of the CUDA driver that inferd uses, found at run time; the ABI of CUDA 12 (cuda.h), declared by hand.
#
# The functions of the table may be called only after `load` has succeeded: `cuda_ready`. Each returns a Result, from
# which `check` makes an exception.

ctypedef int Result
ctypedef int CudaDevice
ctypedef void *Context
ctypedef void *StreamHandle
ctypedef void *EventHandle
ctypedef void *GraphHandle
ctypedef void *GraphExecHandle
ctypedef unsigned long long DevicePointer

cdef enum:
    IPC_HANDLE_SIZE = 64

cdef struct IpcHandle:
    char reserved[64]

cdef enum:
    # CUresult
    CUDA_OK = 0
    CUDA_NOT_READY = 600

cdef enum:
    STREAM_NON_BLOCKING = 1         # CU_STREAM_NON_BLOCKING
    EVENT_BLOCKING_SYNC = 1
    EVENT_DISABLE_TIMING = 2
    HOST_ALLOC_PORTABLE = 1         # CU_MEMHOSTALLOC_PORTABLE
    IPC_LAZY_ENABLE_PEER_ACCESS = 1
    CAPTURE_THREAD_LOCAL = 1        # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

cdef enum:
    # CUdevice_attribute
    ATTRIBUTE_COMPUTE_MAJOR = 75
    ATTRIBUTE_COMPUTE_MINOR = 76
    ATTRIBUTE_HOST_NUMA_ID = 134

cdef struct Driver:
    Result (*init)(unsigned int flags) noexcept nogil
    Result (*driver_version)(int *version) noexcept nogil
    Result (*error_name)(Result error, const char **text) noexcept nogil
    Result (*error_string)(Result error, const char **text) noexcept nogil
    # devices and contexts
    Result (*device_count)(int *count) noexcept nogil
    Result (*device_get)(CudaDevice *device, int ordinal) noexcept nogil
    Result (*device_name)(char *name, int room, CudaDevice device) noexcept nogil
    Result (*device_uuid)(char *uuid, CudaDevice device) noexcept nogil
    Result (*device_total_memory)(size_t *bytes, CudaDevice device) noexcept nogil
    Result (*device_attribute)(int *value, int attribute, CudaDevice device) noexcept nogil
    Result (*device_pci_bus_id)(char *text, int room, CudaDevice device) noexcept nogil
    Result (*primary_context_retain)(Context *context, CudaDevice device) noexcept nogil
    Result (*primary_context_release)(CudaDevice device) noexcept nogil
    Result (*context_set_current)(Context context) noexcept nogil
    Result (*context_get_current)(Context *context) noexcept nogil
    Result (*stream_priority_range)(int *least, int *greatest) noexcept nogil
    # memory
    Result (*memory_info)(size_t *free, size_t *total) noexcept nogil
    Result (*memory_allocate)(DevicePointer *pointer, size_t size) noexcept nogil
    Result (*memory_free)(DevicePointer pointer) noexcept nogil
    Result (*host_allocate)(void **pointer, size_t size, unsigned int flags) noexcept nogil
    Result (*host_free)(void *pointer) noexcept nogil
    Result (*address_range)(DevicePointer *base, size_t *size, DevicePointer pointer) noexcept nogil
    Result (*copy_to_device)(DevicePointer to, const void *source, size_t size, StreamHandle stream) noexcept nogil
    Result (*copy_to_host)(void *to, DevicePointer source, size_t size, StreamHandle stream) noexcept nogil
    Result (*copy_on_device)(DevicePointer to, DevicePointer source, size_t size, StreamHandle stream) noexcept nogil
    Result (*fill)(DevicePointer to, unsigned char value, size_t count, StreamHandle stream) noexcept nogil
    # streams and events
    Result (*stream_create)(StreamHandle *stream, unsigned int flags, int priority) noexcept nogil
    Result (*stream_destroy)(StreamHandle stream) noexcept nogil
    Result (*stream_wait_event)(StreamHandle stream, EventHandle event, unsigned int flags) noexcept nogil
    Result (*stream_synchronize)(StreamHandle stream) noexcept nogil
    Result (*stream_query)(StreamHandle stream) noexcept nogil
    Result (*event_create)(EventHandle *event, unsigned int flags) noexcept nogil
    Result (*event_destroy)(EventHandle event) noexcept nogil
    Result (*event_record)(EventHandle event, StreamHandle stream) noexcept nogil
    Result (*event_query)(EventHandle event) noexcept nogil
    Result (*event_synchronize)(EventHandle event) noexcept nogil
    # sharing between processes
    Result (*ipc_open)(DevicePointer *pointer, IpcHandle handle, unsigned int flags) noexcept nogil
    Result (*ipc_close)(DevicePointer pointer) noexcept nogil
    # graphs
    Result (*capture_begin)(StreamHandle stream, int mode) noexcept nogil
    Result (*capture_end)(StreamHandle stream, GraphHandle *graph) noexcept nogil
    Result (*graph_instantiate)(GraphExecHandle *graph, GraphHandle source, unsigned long long flags) noexcept nogil
    Result (*graph_launch)(GraphExecHandle graph, StreamHandle stream) noexcept nogil
    Result (*graph_exec_destroy)(GraphExecHandle graph) noexcept nogil
    Result (*graph_destroy)(GraphHandle graph) noexcept nogil

# The table; calls are written `cuda.<function>(...)`.
cdef Driver cuda
# Whether the table is set and cuInit has succeeded.
cdef bint cuda_ready() noexcept nogil
# Raise CudaError for results other than CUDA_OK; `call` is the driver's name of the function. Needs the GIL.
cdef int check(Result result, const char *call) except -1
# "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY: out of memory" in memory from malloc; NULL if there is none.
cdef char *describe(Result result, const char *call) noexcept nogil
# Raise CudaUnavailable unless `load` has succeeded. Needs the GIL.
cdef int require() except -1
# Whether the context is unusable after this error, so that every later call will fail with it.
cdef bint is_sticky(Result result) noexcept nogil
