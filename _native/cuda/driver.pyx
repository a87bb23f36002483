"""The table of driver functions: found when the server first asks for a GPU, never at import.

The library is `libcuda.so.1`, which NVIDIA's driver installs, unless `load` gets another path. A name with
its suffix (`cuMemAlloc_v2`) has one signature for ever, so the table also fits later drivers.
"""

from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym

from inferd._native.text cimport format_text

import threading

DEFAULT_LIBRARY = "libcuda.so.1"

cdef bint ready = False
cdef void *library = NULL
_guard = threading.Lock()
_loaded_from = None
_failure = None


class CudaError(RuntimeError):
    """A call of the driver failed.

    Attributes:
        call: the driver's function.
        code: its CUresult.
        name: what the driver calls the code, such as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call = call
        self.code = code
        self.name = name


class CudaUnavailable(RuntimeError):
    """There is no driver, it does not start, or it reports no device; the text says which."""


cdef bint cuda_ready() noexcept nogil:
    return ready


cdef bint is_sticky(Result result) noexcept nogil:
    # errors of a kernel or of the device: illegal address or instruction, failed launch, assertion, ECC, lost device
    return result in (214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721)


cdef const char *text_of(Result (*ask)(Result, const char **) noexcept nogil, Result result) noexcept nogil:
    cdef const char *text = NULL
    if ask == NULL or ask(result, &text) != CUDA_OK or text == NULL:
        return "unknown error"
    return text


cdef char *describe(Result result, const char *call) noexcept nogil:
    return format_text("%s: %s (%d): %s", call, text_of(cuda.error_name, result), result,
                       text_of(cuda.error_string, result))


cdef int check(Result result, const char *call) except -1:
    if result != CUDA_OK:
        raise CudaError(call.decode(), result, text_of(cuda.error_name, result).decode(),
                        text_of(cuda.error_string, result).decode())
    return 0


cdef list slots():
    # the name of each function in the library, and the place for its address
    return [
        ("cuInit", <size_t>&cuda.init),
        ("cuDriverGetVersion", <size_t>&cuda.driver_version),
        ("cuGetErrorName", <size_t>&cuda.error_name),
        ("cuGetErrorString", <size_t>&cuda.error_string),
        ("cuDeviceGetCount", <size_t>&cuda.device_count),
        ("cuDeviceGet", <size_t>&cuda.device_get),
        ("cuDeviceGetName", <size_t>&cuda.device_name),
        ("cuDeviceGetUuid_v2", <size_t>&cuda.device_uuid),
        ("cuDeviceTotalMem_v2", <size_t>&cuda.device_total_memory),
        ("cuDeviceGetAttribute", <size_t>&cuda.device_attribute),
        ("cuDeviceGetPCIBusId", <size_t>&cuda.device_pci_bus_id),
        ("cuDevicePrimaryCtxRetain", <size_t>&cuda.primary_context_retain),
        ("cuDevicePrimaryCtxRelease_v2", <size_t>&cuda.primary_context_release),
        ("cuCtxSetCurrent", <size_t>&cuda.context_set_current),
        ("cuCtxGetCurrent", <size_t>&cuda.context_get_current),
        ("cuCtxGetStreamPriorityRange", <size_t>&cuda.stream_priority_range),
        ("cuMemGetInfo_v2", <size_t>&cuda.memory_info),
        ("cuMemAlloc_v2", <size_t>&cuda.memory_allocate),
        ("cuMemFree_v2", <size_t>&cuda.memory_free),
        ("cuMemHostAlloc", <size_t>&cuda.host_allocate),
        ("cuMemFreeHost", <size_t>&cuda.host_free),
        ("cuMemGetAddressRange_v2", <size_t>&cuda.address_range),
        ("cuMemcpyHtoDAsync_v2", <size_t>&cuda.copy_to_device),
        ("cuMemcpyDtoHAsync_v2", <size_t>&cuda.copy_to_host),
        ("cuMemcpyDtoDAsync_v2", <size_t>&cuda.copy_on_device),
        ("cuMemsetD8Async", <size_t>&cuda.fill),
        ("cuStreamCreateWithPriority", <size_t>&cuda.stream_create),
        ("cuStreamDestroy_v2", <size_t>&cuda.stream_destroy),
        ("cuStreamWaitEvent", <size_t>&cuda.stream_wait_event),
        ("cuStreamSynchronize", <size_t>&cuda.stream_synchronize),
        ("cuStreamQuery", <size_t>&cuda.stream_query),
        ("cuEventCreate", <size_t>&cuda.event_create),
        ("cuEventDestroy_v2", <size_t>&cuda.event_destroy),
        ("cuEventRecord", <size_t>&cuda.event_record),
        ("cuEventQuery", <size_t>&cuda.event_query),
        ("cuEventSynchronize", <size_t>&cuda.event_synchronize),
        ("cuIpcOpenMemHandle_v2", <size_t>&cuda.ipc_open),
        ("cuIpcCloseMemHandle", <size_t>&cuda.ipc_close),
        ("cuStreamBeginCapture_v2", <size_t>&cuda.capture_begin),
        ("cuStreamEndCapture", <size_t>&cuda.capture_end),
        ("cuGraphInstantiateWithFlags", <size_t>&cuda.graph_instantiate),
        ("cuGraphLaunch", <size_t>&cuda.graph_launch),
        ("cuGraphExecDestroy", <size_t>&cuda.graph_exec_destroy),
        ("cuGraphDestroy", <size_t>&cuda.graph_destroy),
    ]


def load(path: str = DEFAULT_LIBRARY) -> None:
    """Find the driver and initialise it. The outcome, also a failure, is kept for later calls with the same path.

    Args:
        path: of the library, or its name for the system's search.

    Raises:
        CudaUnavailable: the library or a function of it is not there, the driver reports no usable device, or the
            driver was loaded from another library.
    """
    global ready, _loaded_from, _failure
    with _guard:
        if ready:
            if path != _loaded_from:
                raise CudaUnavailable(f"the CUDA driver was loaded from '{_loaded_from}' already, not from '{path}'")
            return
        if _failure is None or path != _loaded_from:
            _loaded_from = path
            _failure = fill_table(path)
        if _failure is not None:
            raise CudaUnavailable(_failure)
        ready = True


cdef str fill_table(str path):
    # why the driver cannot be used; None when it can
    global library
    cdef void *address
    cdef Result result
    library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        return f"no CUDA driver: {dlerror().decode('utf-8', 'replace')}"
    for name, slot in slots():
        address = dlsym(library, (<str>name).encode())
        if address == NULL:
            return f"the CUDA driver in '{path}' has no function {name}: CUDA 12.0 or newer is needed"
        (<void **><size_t>slot)[0] = address
    with nogil:
        result = cuda.init(0)
    if result != CUDA_OK:
        return (f"the CUDA driver in '{path}' does not start: cuInit: {text_of(cuda.error_name, result).decode()}: "
                f"{text_of(cuda.error_string, result).decode()}")
    return None


def library_name() -> str:
    """The path or name that the last `load` got. Worker processes get it, too, and load the same library."""
    return _loaded_from or DEFAULT_LIBRARY


def is_loaded() -> bool:
    """Whether `load` has succeeded."""
    return ready


def version() -> tuple[int, int]:
    """The CUDA version that the driver supports, as (13, 0)."""
    cdef int number = 0
    require()
    check(cuda.driver_version(&number), "cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def device_count() -> int:
    """How many devices the driver shows; 0 without a driver."""
    cdef int count = 0
    if not ready:
        return 0
    check(cuda.device_count(&count), "cuDeviceGetCount")
    return count


cdef int require() except -1:
    if not ready:
        raise CudaUnavailable(_failure or "the CUDA driver is not loaded: call inferd._native.cuda.driver.load first")
    return 0
