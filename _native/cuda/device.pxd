# Devices, streams, events, graphs and memory of CUDA as objects of Python; the handles are for C.

from _native.cuda.driver cimport (
    Context,
    CudaDevice,
    DevicePointer,
    EventHandle,
    GraphExecHandle,
    Result,
    StreamHandle,
)


cdef class Device:
    cdef readonly int ordinal
    cdef CudaDevice device
    cdef Context context             # the primary one, which torch, TensorRT and the runtime library use as well
    cdef object __weakref__


cdef class Stream:
    cdef readonly Device device
    cdef StreamHandle stream


cdef class Event:
    cdef readonly Device device
    cdef EventHandle event


cdef class Graph:
    cdef readonly Device device
    cdef GraphExecHandle graph


cdef class DeviceMemory:
    cdef readonly Device device
    cdef readonly size_t size
    cdef DevicePointer address
    cdef bint imported

# The device that lies under `ordinal`; the same object while somebody holds it.
cdef Device device_of(int ordinal)
# Make a context the current one of this thread, and have the one back afterwards that was current before, or none. The
# only way in for whoever does not have a thread of his own (`Device.use`): page-locked memory is shared by devices, and
# objects are dropped by any thread. `context_leave` has to follow unless an error is returned.
cdef Result context_enter(Context wanted, Context *before) noexcept nogil
cdef void context_leave(Context before) noexcept nogil
# Make the device's context current on a thread that works for this device only; cheap when it is already.
cdef Result use_device(Device device) noexcept nogil
