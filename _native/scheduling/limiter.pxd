# The rate limiter: instances execute only while they hold the resources that they need.

from inferd._native.scheduling.dispatcher cimport Claim, Dispatcher


cdef class RateLimiter:
    cdef Dispatcher dispatcher


cdef class ClaimHandle:
    # a Claim for Python
    cdef Claim claim
    cdef RateLimiter limiter
    cdef list resources
