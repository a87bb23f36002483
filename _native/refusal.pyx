"""Why requests and calls are refused: one table of the reasons, and how many there were of each in this process."""

from libc.stdint cimport int64_t

from inferd._native.atomic cimport fetch_add64, load64
from inferd._native.status cimport (
    STATUS_DEADLINE_EXCEEDED,
    STATUS_INTERNAL,
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_PERMISSION_DENIED,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAUTHENTICATED,
    STATUS_UNAVAILABLE,
    STATUS_UNIMPLEMENTED,
)

cdef enum:
    RETRY = 1                # a retry may help
    USUAL = 2                # stands for its status where nothing else is known; one row of a status

cdef struct Row:
    const char *name
    int status
    int flags
    const char *help

cdef Row[<int>REFUSALS] table
cdef int64_t[<int>REFUSALS] counts

table[<int>REFUSAL_NONE] = Row("INTERNAL", STATUS_INTERNAL, 0, "")
table[<int>REFUSAL_QUEUE_FULL] = Row(
    "QUEUE_FULL", STATUS_UNAVAILABLE, RETRY,
    "the queue of a model is full: more instances, `max_queue_size`, `--max-queued-requests-per-model`")
table[<int>REFUSAL_QUEUE_TIMEOUT] = Row(
    "QUEUE_TIMEOUT", STATUS_UNAVAILABLE, RETRY, "it waited as long as the model's queue policy allows")
table[<int>REFUSAL_SERVER_FULL] = Row(
    "SERVER_FULL", STATUS_UNAVAILABLE, RETRY, "too many requests are in the server: `--max-inflight-requests`")
table[<int>REFUSAL_SERVER_BYTES] = Row(
    "SERVER_FULL", STATUS_RESOURCE_EXHAUSTED, RETRY,
    "the requests and responses in the server have too many bytes: `--max-held-bytes`")
table[<int>REFUSAL_STOPPING] = Row(
    "STOPPING", STATUS_UNAVAILABLE, RETRY,
    "the server stops, or the connection is past `--grpc-max-connection-age`: call again")
table[<int>REFUSAL_CLIENT_LIMIT] = Row(
    "CLIENT_LIMIT", STATUS_RESOURCE_EXHAUSTED, RETRY,
    "the client has used its quota: `--grpc-max-calls-per-client` and the other options `...-per-client`")
table[<int>REFUSAL_LIMIT_EXCEEDED] = Row(
    "LIMIT_EXCEEDED", STATUS_RESOURCE_EXHAUSTED, USUAL,
    "the request alone exceeds a limit, or the system has no more of a resource")
table[<int>REFUSAL_SLOW_REQUEST] = Row(
    "SLOW_REQUEST", STATUS_DEADLINE_EXCEEDED, 0, "the request did not arrive in time: `--grpc-receive-timeout`")
table[<int>REFUSAL_PROTOCOL] = Row(
    "PROTOCOL_VIOLATION", STATUS_INTERNAL, 0,
    "the call violates gRPC's protocol, as the text says: a fault of the client's library, or of a proxy")
table[<int>REFUSAL_CARDINALITY] = Row(
    "PROTOCOL_VIOLATION", STATUS_UNIMPLEMENTED, 0,
    "the same: the call has no request message, or several, and its method takes one")
table[<int>REFUSAL_SEQUENCE_ENDED] = Row(
    "SEQUENCE_ENDED", STATUS_INVALID_ARGUMENT, 0,
    "the sequence was ended before, as the text says: begin it again with START")
table[<int>REFUSAL_WORKER_DIED] = Row(
    "WORKER_DIED", STATUS_UNAVAILABLE, RETRY, "the worker process of a Python model ended; it is started again")
table[<int>REFUSAL_UNKNOWN_CALLER] = Row(
    "UNKNOWN_CALLER", STATUS_UNAUTHENTICATED, USUAL, "the call has no valid token, or not the header of its protocol")
table[<int>REFUSAL_NOT_ALLOWED] = Row(
    "NOT_ALLOWED", STATUS_PERMISSION_DENIED, USUAL, "the token does not allow the RPC, the model or the override")
table[<int>REFUSAL_INVALID_REQUEST] = Row(
    "INVALID_REQUEST", STATUS_INVALID_ARGUMENT, USUAL,
    "the request is wrong or does not fit the model: the text says what was expected")
table[<int>REFUSAL_NOT_FOUND] = Row(
    "NOT_FOUND", STATUS_NOT_FOUND, USUAL, "the model, the version or another named thing does not exist")
table[<int>REFUSAL_DEADLINE] = Row("DEADLINE_EXCEEDED", STATUS_DEADLINE_EXCEEDED, USUAL, "the call's deadline passed")
table[<int>REFUSAL_NOT_SERVED] = Row(
    "NOT_SERVED", STATUS_UNIMPLEMENTED, USUAL, "the feature is off, or not served at this address")
table[<int>REFUSAL_NOT_READY] = Row(
    "NOT_READY", STATUS_UNAVAILABLE, RETRY | USUAL, "the model is being loaded or unloaded, or its load failed")
table[<int>REFUSAL_INTERNAL] = Row("INTERNAL", STATUS_INTERNAL, USUAL, "an error of the server or of a model")

cdef int _i
for _i in range(<int>REFUSALS):
    if table[_i].name == NULL:
        raise SystemError(f"value {_i} of the enum Refusal has no row")


cdef int refusal_status(Refusal refusal) noexcept nogil:
    return table[<int>refusal].status


cdef const char *refusal_name(Refusal refusal) noexcept nogil:
    return table[<int>refusal].name


cdef bint refusal_retries(Refusal refusal) noexcept nogil:
    return table[<int>refusal].flags & RETRY != 0


cdef Refusal refusal_usual(int status) noexcept nogil:
    cdef int i
    for i in range(1, <int>REFUSALS):
        if table[i].flags & USUAL and table[i].status == status:
            return <Refusal>i
    return REFUSAL_INTERNAL


cdef bint refusal_denies(Refusal refusal) noexcept nogil:
    return refusal == REFUSAL_UNKNOWN_CALLER or refusal == REFUSAL_NOT_ALLOWED


cdef void refusal_count(Refusal refusal) noexcept nogil:
    fetch_add64(&counts[<int>refusal], 1)


# Refusals that Python code chooses. Others it only passes on, as numbers; 0 stands for the usual one of a status.
STOPPING = <int>REFUSAL_STOPPING
CARDINALITY = <int>REFUSAL_CARDINALITY


def count_refusal(status: int, refusal: int = 0) -> None:
    """Count a call that Python code refuses with this status."""
    refusal_count(refusal_or_usual(<Refusal><int>refusal, status))


def refusal_counts() -> dict[str, int]:
    """How many requests and calls this process has refused, by reason; only those that there were."""
    cdef int i
    cdef dict found = {}
    for i in range(1, <int>REFUSALS):
        if load64(&counts[i]):
            name = table[i].name.decode()
            found[name] = found.get(name, 0) + load64(&counts[i])
    return found


def refusal_table() -> list[tuple[str, int, bool, str]]:
    """The reasons for the docs: (name, gRPC status code, whether a retry may help, meaning and remedy).

    The first one has the number 1.
    """
    return [(table[i].name.decode(), table[i].status, table[i].flags & RETRY != 0, table[i].help.decode())
            for i in range(1, <int>REFUSALS)]
