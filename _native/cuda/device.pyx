"""CUDA objects for Python: a device with its primary context, streams, events, graphs, memory.

Addresses are plain integers, and lengths of copies are not checked: this module is for code that knows its memory
(instances, backends, tests), not for values from clients. `synchronize` waits for the device, and releases the
GIL. `allocate`, and copies of memory that is not page-locked, may wait in the driver; `Stream.wait` orders two streams.
"""

cimport cython
from libc.stdint cimport uintptr_t

from inferd._native.cuda.driver cimport (
    ATTRIBUTE_COMPUTE_MAJOR,
    ATTRIBUTE_COMPUTE_MINOR,
    ATTRIBUTE_HOST_NUMA_ID,
    CAPTURE_THREAD_LOCAL,
    CUDA_NOT_READY,
    CUDA_OK,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    STREAM_NON_BLOCKING,
    Context,
    GraphHandle,
    Result,
    check,
    cuda,
    require,
)

import threading
import weakref
from pathlib import Path

_devices = weakref.WeakValueDictionary()
_guard = threading.Lock()


cdef Result use_context(Context context) noexcept nogil:
    cdef Context current = NULL
    cdef Result result = cuda.context_get_current(&current)
    if result != CUDA_OK or current == context:
        return result
    return cuda.context_set_current(context)


cdef Result use_device(Device device) noexcept nogil:
    return use_context(device.context)


cdef Result context_enter(Context wanted, Context *before) noexcept nogil:
    cdef Result result
    before[0] = NULL
    result = cuda.context_get_current(before)
    if result == CUDA_OK and before[0] != wanted:
        result = cuda.context_set_current(wanted)
    return result


cdef void context_leave(Context before) noexcept nogil:
    use_context(before)


ctypedef Result (*handle_fn)(void *handle) noexcept nogil


cdef Result call_in(Context context, handle_fn call, void *handle) noexcept nogil:
    # a function of the driver with this context as the current one
    cdef Context before
    cdef Result result = context_enter(context, &before)
    if result == CUDA_OK:
        result = call(handle)
        context_leave(before)
    return result


cdef bint is_over(Result result, const char *call) except -1:
    # the result of a query of a stream or an event
    if result == CUDA_NOT_READY:
        return False
    check(result, call)
    return True


cdef Device device_of(int ordinal):
    with _guard:
        found = _devices.get(ordinal)
        if found is None:
            found = Device.__new__(Device, ordinal)
            _devices[ordinal] = found
        return <Device> found


def device(ordinal: int) -> Device:
    """The device number `ordinal`, as the driver counts them (CUDA_VISIBLE_DEVICES applies).

    Raises:
        CudaUnavailable: no driver is loaded.
        CudaError: there is no such device, or it gives no context.
    """
    return device_of(ordinal)


@cython.no_gc
cdef class Device:
    """A GPU and its primary context, which is held while this object lives. Made by `device`."""

    def __cinit__(self, int ordinal):
        require()
        self.ordinal = ordinal
        check(cuda.device_get(&self.device, ordinal), "cuDeviceGet")
        check(cuda.primary_context_retain(&self.context, self.device), "cuDevicePrimaryCtxRetain")

    def __init__(self, *_):
        raise TypeError("a Device is made by inferd._native.cuda.device.device(ordinal)")

    def __dealloc__(self):
        if self.context != NULL:
            cuda.primary_context_release(self.device)

    def __repr__(self):
        return f"Device({self.ordinal})"

    def use(self) -> None:
        """Make the device's context the current one of this thread. Every thread that uses the device must do this."""
        check(use_device(self), "cuCtxSetCurrent")

    def attribute(self, number: int) -> int:
        """An attribute of the device by its CUdevice_attribute."""
        cdef int value = 0
        check(cuda.device_attribute(&value, number, self.device), "cuDeviceGetAttribute")
        return value

    @property
    def name(self) -> str:
        cdef char text[256]
        check(cuda.device_name(text, sizeof(text), self.device), "cuDeviceGetName")
        return (<bytes>text).decode()

    @property
    def uuid(self) -> str:
        """As nvidia-smi prints it: "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"."""
        cdef char raw[16]
        check(cuda.device_uuid(raw, self.device), "cuDeviceGetUuid_v2")
        digits = raw[:16].hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.attribute(ATTRIBUTE_COMPUTE_MAJOR), self.attribute(ATTRIBUTE_COMPUTE_MINOR)

    @property
    def pci_bus_id(self) -> str:
        cdef char text[64]
        check(cuda.device_pci_bus_id(text, sizeof(text), self.device), "cuDeviceGetPCIBusId")
        return (<bytes>text).decode()

    @property
    def numa_node(self) -> int:
        """The NUMA node of the host that is nearest to the device; -1 if it is not known."""
        cdef int node = -1
        if cuda.device_attribute(&node, ATTRIBUTE_HOST_NUMA_ID, self.device) == CUDA_OK and node >= 0:
            return node
        try:
            return int(Path(f"/sys/bus/pci/devices/{self.pci_bus_id.lower()}/numa_node").read_text())
        except (OSError, ValueError):
            return -1

    @property
    def total_memory(self) -> int:
        """Bytes."""
        cdef size_t size = 0
        check(cuda.device_total_memory(&size, self.device), "cuDeviceTotalMem_v2")
        return size

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes; the memory of all processes counts as used."""
        cdef size_t free = 0, total = 0
        cdef Result result
        cdef Context before
        with nogil:
            result = context_enter(self.context, &before)
            if result == CUDA_OK:
                result = cuda.memory_info(&free, &total)
                context_leave(before)
        check(result, "cuMemGetInfo_v2")
        return free, total

    @property
    def stream_priorities(self) -> tuple[int, int]:
        """The least and the greatest priority of a stream; greater priorities are smaller numbers."""
        cdef int least = 0, greatest = 0
        cdef Context before
        cdef Result result = context_enter(self.context, &before)
        if result == CUDA_OK:
            result = cuda.stream_priority_range(&least, &greatest)
            context_leave(before)
        check(result, "cuCtxGetStreamPriorityRange")
        return least, greatest

    def priority(self, wish: int) -> int:
        """The priority of a stream that is more (1) or less (-1) urgent than others (0)."""
        least, greatest = self.stream_priorities
        return greatest if wish > 0 else least if wish < 0 else 0

    def stream(self, priority: int = 0) -> Stream:
        """A new stream that does not wait for the default stream; for threads that `use` the device."""
        return Stream.__new__(Stream, self, priority)

    def event(self) -> Event:
        """A new event. A thread that waits for it sleeps."""
        return Event.__new__(Event, self)

    def allocate(self, size: int) -> DeviceMemory:
        """New memory, for data that live as long as a model: the allocation waits for the whole device."""
        cdef DeviceMemory memory = DeviceMemory.__new__(DeviceMemory, self)
        cdef size_t wanted = size
        cdef Result result
        cdef Context before
        with nogil:
            result = context_enter(self.context, &before)
            if result == CUDA_OK:
                result = cuda.memory_allocate(&memory.address, wanted)
                context_leave(before)
        check(result, "cuMemAlloc_v2")
        memory.size = wanted
        return memory


@cython.no_gc
cdef class Stream:
    """A queue of work, which the device runs in order. Methods return before it has run; `synchronize` waits for it."""

    def __cinit__(self, Device device not None, int priority=0):
        cdef Context before
        cdef Result result
        self.device = device
        result = context_enter(device.context, &before)
        if result == CUDA_OK:
            result = cuda.stream_create(&self.stream, STREAM_NON_BLOCKING, priority)
            context_leave(before)
        check(result, "cuStreamCreateWithPriority")

    def __dealloc__(self):
        if self.stream != NULL:
            call_in(self.device.context, cuda.stream_destroy, self.stream)

    @property
    def handle(self) -> int:
        """The CUstream, for frameworks: `torch.cuda.ExternalStream(stream.handle)`."""
        return <uintptr_t>self.stream

    def copy_to_device(self, to: int, source: int, size: int) -> None:
        """Copy from host memory. If the source is not page-locked, the driver may wait for the copy."""
        cdef DevicePointer target = to
        cdef const void *host = <const void *><uintptr_t>source
        cdef size_t length = size
        cdef Result result
        with nogil:
            result = cuda.copy_to_device(target, host, length, self.stream)
        check(result, "cuMemcpyHtoDAsync_v2")

    def copy_to_host(self, to: int, source: int, size: int) -> None:
        """Copy to host memory. If the target is not page-locked, the driver may wait for the copy."""
        cdef void *host = <void *><uintptr_t>to
        cdef DevicePointer origin = source
        cdef size_t length = size
        cdef Result result
        with nogil:
            result = cuda.copy_to_host(host, origin, length, self.stream)
        check(result, "cuMemcpyDtoHAsync_v2")

    def copy_on_device(self, to: int, source: int, size: int) -> None:
        check(cuda.copy_on_device(to, source, size, self.stream), "cuMemcpyDtoDAsync_v2")

    def fill(self, to: int, value: int, size: int) -> None:
        """Set `size` bytes to `value`."""
        check(cuda.fill(to, value, size, self.stream), "cuMemsetD8Async")

    def wait(self, event: Event) -> None:
        """Later work of this stream waits until the event is reached."""
        check(cuda.stream_wait_event(self.stream, event.event, 0), "cuStreamWaitEvent")

    def record(self, event: Event) -> None:
        """The event is reached when everything submitted so far has run."""
        check(cuda.event_record(event.event, self.stream), "cuEventRecord")

    def launch(self, graph: Graph) -> None:
        """Run a captured graph."""
        check(cuda.graph_launch(graph.graph, self.stream), "cuGraphLaunch")

    def synchronize(self) -> None:
        """Wait until everything submitted so far has run."""
        cdef Result result
        with nogil:
            result = call_in(self.device.context, cuda.stream_synchronize, self.stream)
        check(result, "cuStreamSynchronize")

    def is_done(self) -> bool:
        """Whether everything submitted so far has run."""
        return is_over(cuda.stream_query(self.stream), "cuStreamQuery")

    def begin_capture(self) -> None:
        """Record this thread's work for the stream from now on, instead of running it."""
        check(cuda.capture_begin(self.stream, CAPTURE_THREAD_LOCAL), "cuStreamBeginCapture_v2")

    def end_capture(self) -> Graph:
        """End the recording; the graph of what was recorded, ready to be launched.

        Raises:
            CudaError: a call cannot be captured. The stream is as before the capture.
        """
        cdef Graph graph = Graph.__new__(Graph, self.device)
        cdef GraphHandle source = NULL
        cdef Result result
        check(cuda.capture_end(self.stream, &source), "cuStreamEndCapture")
        with nogil:
            result = cuda.graph_instantiate(&graph.graph, source, 0)
            cuda.graph_destroy(source)
        check(result, "cuGraphInstantiateWithFlags")
        return graph


@cython.no_gc
cdef class Event:
    """A point in a stream that threads and other streams can wait for."""

    def __cinit__(self, Device device not None):
        cdef Context before
        cdef Result result
        self.device = device
        result = context_enter(device.context, &before)
        if result == CUDA_OK:
            result = cuda.event_create(&self.event, EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC)
            context_leave(before)
        check(result, "cuEventCreate")

    def __dealloc__(self):
        if self.event != NULL:
            call_in(self.device.context, cuda.event_destroy, self.event)

    def is_done(self) -> bool:
        """Whether the event is reached; true if it was never recorded."""
        return is_over(cuda.event_query(self.event), "cuEventQuery")

    def synchronize(self) -> None:
        """Wait until the event is reached."""
        cdef Result result
        with nogil:
            result = call_in(self.device.context, cuda.event_synchronize, self.event)
        check(result, "cuEventSynchronize")


@cython.no_gc
cdef class Graph:
    """Recorded work that is launched together. Made by `Stream.end_capture`."""

    def __cinit__(self, Device device not None):
        self.device = device

    def __dealloc__(self):
        if self.graph != NULL:
            call_in(self.device.context, cuda.graph_exec_destroy, self.graph)


@cython.no_gc
cdef class DeviceMemory:
    """Memory of a device, freed with this object. Made by `Device.allocate`."""

    def __cinit__(self, Device device not None):
        self.device = device

    def __dealloc__(self):
        cdef Context before
        if self.address and context_enter(self.device.context, &before) == CUDA_OK:
            cuda.memory_free(self.address)
            context_leave(before)

    @property
    def pointer(self) -> int:
        """Its address on the device."""
        return self.address
