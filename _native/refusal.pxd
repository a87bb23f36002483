# Why requests and calls are refused: one table of the reasons, from which ErrorInfo, the metric and the docs come.

# A new reason is a value here, between the first and the last, and its row in refusal.pyx; the docs are generated from
# the rows.
cdef enum Refusal:
    REFUSAL_NONE             # no reason was given: that of refusal_usual counts
    REFUSAL_QUEUE_FULL
    REFUSAL_QUEUE_TIMEOUT
    REFUSAL_SERVER_FULL      # it has too many requests
    REFUSAL_SERVER_BYTES     # it holds too many bytes
    REFUSAL_STOPPING
    REFUSAL_CLIENT_LIMIT     # any limit of the client's quota
    REFUSAL_LIMIT_EXCEEDED
    REFUSAL_SLOW_REQUEST
    REFUSAL_PROTOCOL         # the call violates gRPC's protocol
    REFUSAL_CARDINALITY      # the same: it has not as many messages as its method takes
    REFUSAL_SEQUENCE_ENDED
    REFUSAL_WORKER_DIED
    REFUSAL_UNKNOWN_CALLER
    REFUSAL_NOT_ALLOWED
    REFUSAL_INVALID_REQUEST
    REFUSAL_NOT_FOUND
    REFUSAL_DEADLINE
    REFUSAL_NOT_SERVED
    REFUSAL_NOT_READY
    REFUSAL_INTERNAL
    REFUSALS

# Of a refusal: the gRPC status; the reason, in ErrorInfo and in the metric; and whether a retry may help.
cdef int refusal_status(Refusal refusal) noexcept nogil
cdef const char *refusal_name(Refusal refusal) noexcept nogil
cdef bint refusal_retries(Refusal refusal) noexcept nogil
# The refusal that stands for a status, where no other is known: the row of this status that is marked USUAL.
cdef Refusal refusal_usual(int status) noexcept nogil
# Whether the refusal is for lack of rights.
cdef bint refusal_denies(Refusal refusal) noexcept nogil
# Count one refused request or call. Whoever ends it counts it, once. A deadline that has passed is no refusal.
cdef void refusal_count(Refusal refusal) noexcept nogil
# `refusal`, or the usual one of the status if it is REFUSAL_NONE.
cdef inline Refusal refusal_or_usual(Refusal refusal, int status) noexcept nogil:
    return refusal if refusal else refusal_usual(status)
