# Endpoints: the state that the connections of one front share.

from inferd._native.timers cimport TimersHandle
from inferd._native.transport.stream cimport Host, Interceptor, Service
from inferd._native.transport.thread_pool cimport PoolThreads


cdef class Endpoint:
    cdef Host host
    cdef PoolThreads pool_threads
    cdef object on_call          # called with each new Call
    cdef readonly TimersHandle timers    # contains the timers of this endpoint
    cdef object own_clock        # seconds; None: time.monotonic()
    # Serve the calls of this path by `service`. `context` must outlive the endpoint.
    cdef int add_native(self, bytes path, const Service *service, void *context) except -1


cdef class InterceptorHandle:
    # the check of the native calls of some connections, for example those of one listener
    cdef Interceptor interceptor
