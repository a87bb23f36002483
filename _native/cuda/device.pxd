# CUDA devices, streams, events, graphs and memory as Python objects; the driver's handles are for Cython callers.

from inferd._native.cuda.driver cimport (
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
    cdef Context context             # the primary context, which torch, TensorRT and the runtime library use as well
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

# The device with this ordinal; the same object while a reference to it exists.
cdef Device device_of(int ordinal)
# Make a context current on the calling thread, and restore the previous one, or none. A thread that has not called
# `Device.use` puts driver calls between this pair: any thread may free page-locked memory or an object of a device.
# Call `context_leave` unless an error was returned.
cdef Result context_enter(Context wanted, Context *before) noexcept nogil
cdef void context_leave(Context before) noexcept nogil
# Make the device's context current on a thread that works only for this device; cheap if it is already.
cdef Result use_device(Device device) noexcept nogil
