"""The wire between the server and the worker process of one instance of a Python model.

This module is the one place where the layout is written down; `backends/python/_wire.pxd` is the same in C, and a test
compares them. It needs nothing but the standard library and Python 3.9.

**Transport.** The worker inherits four descriptors: three connected Unix sockets of type SOCK_SEQPACKET and the arena.

* *work*: EXECUTE and then DONE, one batch at a time. In the worker the main thread reads it, in the server the thread
  of the instance or the front, so a batch wakes one thread on each side and no other.
* *side*: packets of any thread at any time (responses of senders, logs, health). In the worker a thread reads it, which
  need not exist before the worker expects something: the server sends there only what the worker has asked for (by
  ALLOCATE, by CALL, by using up its credit), and IS_READY if the worker said that it answers it.
* *calls*: calls to other models (BLS). In the server the front itself reads it, so its packets must be short: a
  request that lies in the arena goes through *side*, and so do the worker's later packets about that call.
  In the worker, the thread that waits for a response reads it.
* *arena*: a sealed, sparse memfd, mapped whole and once by both (`mmap.mmap(fd, 0)`); it is as large as it ever can
  be, and only pages that have been written to exist. It has no name in any file system: it goes with the last process.

The kernel's socket queue is the ring: it orders, wakes, tells the end of the peer, and needs no lock in shared memory.
A wait is a blocking receive: no CPU when idle. The end of any socket means that the server is gone, and the worker
must end at once (its supervisor also kills it then).

**Packets.** Each is a HEAD, and a record that follows it in the packet, at most PACKET bytes together; a longer record
lies in the arena instead (flag IN_ARENA, at `offset`), and then the packet is the HEAD alone. All numbers are
little-endian; every structure begins at a multiple of 8 of its record.

**Tensors** are described by TENSOR and their shape, and lie either in the record (place INLINE, `offset` from the
beginning of the record) or in the arena (place ARENA, `offset` from the beginning of the arena). BYTES tensors are as
on the wire of the v2 protocol: each element a 4-byte length and its bytes. Shapes include the batch dimension.
An input of EXECUTE may also lie where a client has put it on the GPU of the instance (place CUDA, `offset` from where
the handle in CUDA_MEMORY points): the worker opens that memory itself, reads it until the request ends, and closes it.
Or it lies in shared memory of a client that the server trusts (place REGION, `offset` from the beginning of the object;
REGION_MEMORY has the server's descriptor of it), if READY has said that the worker can open that. The worker maps it
privately: the client does not see what the worker writes there. The client may change the object once the EXECUTE has
its DONE, so by then the worker copies what the model keeps of it. The mapping may stay until FORGET, which may come at
any time.

**Memory.** The server owns every byte of the arena; the worker has no allocator.

* What EXECUTE and BLS_RESPONSE refer to may be read and written by the worker until it says that it is done: DONE gives
  back the memory of the EXECUTE, unless it has the flag KEPT because the model holds on to a view; then RELEASE
  gives it back, by the EXECUTE's id. RELEASE comes by another socket than DONE, so either may be read first. A
  BLS_RESPONSE that is IN_ARENA is given back by RELEASE with id 0 and its offset.
* For its outputs the worker gets a *grant*: the range in the EXECUTE. When that is too small it asks for another:
  ALLOCATE (bytes in `offset`) is answered by ALLOCATED on the same socket, with the same id, with the offset, or with
  a `code` other than 0 when there is no memory. Grants of the work socket end with DONE, used or not; with the flag
  KEPT_GRANTS beside KEPT they end when the memory of the EXECUTE does. A grant of the side socket ends with the
  message (RESPONSE, BLS_REQUEST) that names any byte of it, or unused, with FREE. The worker must not touch a grant
  that has ended.
* An output may also lie in the memory of an input of its own request, or of the EXECUTE: then nothing is copied. If
  the input is at place REGION, and the worker has not written to it, the output's place is INPUT plus the input's index
  in the configuration, and `offset` begins there.
* Whatever is INLINE belongs to its receiver.

**Requests** have a number, unique while the request lives; its low 16 bits are its slot. The byte of the arena at
`flags + (number & SLOT_MASK)`, with "flags" from CONFIGURE, is not 0 once the request has been cancelled: reading it is
all that `is_cancelled()` needs. A request ends for the worker with its response in DONE, or, when that said
STATUS_OPEN, with the RESPONSE that has the flag FINAL.

**Life.** HELLO as soon as the interpreter runs (before model.py is looked at), CONFIGURE → READY, then EXECUTE → DONE
as often as the server likes, then FINALIZE → FINALIZED, and the worker exits with 0. After a READY that
says "error", and in mode "complete", the server ends the worker.

=============  ======  =======  ================================================================================
kind           socket  to       head and record
=============  ======  =======  ================================================================================
HELLO          work    server   id = VERSION
CONFIGURE      work    worker   JSON, see below
READY          work    server   JSON, see below
EXECUTE        work    worker   id of the batch; EXECUTE_HEAD, u32 offset of each request in the record, requests
DONE           work    server   id of the batch, flags KEPT, KEPT_GRANTS; a RESPONSE_HEAD and so on for each request, in
                                order. Flag FAILED: the whole batch fails with `code` and the record as
                                text, but for requests that have ended
ALLOCATE       both    server   id chosen by the worker, `offset` = bytes
ALLOCATED      both    worker   that id, `offset`, `code`
FINALIZE       work    worker
FORGET         work    worker   id = number of a region that is closed: the worker unmaps it
FINALIZED      work    server
RESPONSE       side    server   id of the request, flags FINAL, EMPTY (no response, only the flag FINAL); one
                                RESPONSE_HEAD and so on. Each that is not EMPTY uses up one credit of the request
CREDIT         side    server   id of a request that has used up its credit and waits to send another response
CREDIT         side    worker   the answer, once there is credit again: that id, `offset` = how many more responses may
                                be sent. If more of them wait, the worker asks again
RELEASE        side    server   see above
FREE           side    server   `offset` of a grant
BLS_REQUEST    calls   server   id chosen by the worker, flag DECOUPLED; BLS_HEAD, serialized ModelInferRequest
BLS_RESPONSE   calls   worker   that id, flag FINAL, EMPTY, FAILED; a serialized ModelInferResponse, or with FAILED
                                `code` and the record as text; FAILED and DECOUPLED: the model that is called is
                                decoupled, and the BLS_REQUEST did not say so; FAILED and EMPTY: no model got it
BLS_CREDIT     calls   server   that id, `offset` = responses more that are welcome (BLS_WINDOW to begin with)
BLS_CANCEL     calls   server   that id; a BLS_RESPONSE with FINAL still comes
IS_READY       side    worker   id
HEALTH         side    server   that id, flag TRUE; record: why not, as text
LOG            side    server   `code` = LOG_*; text
METRIC         side    server   JSON: one change of a metric, without an answer
STATISTICS     side    server   id of a request, `code` = REPORTED_*; a STATISTICS_RECORD: the times of one response,
                                which may be the last one, so that the request has ended
CALL           side    server   id chosen by the worker; CALL_HEAD, JSON {"call": name, ...}, the files
ANSWER         side    worker   that id; JSON {"result": ...} or {"error": text, "code": code}
=============  ======  =======  ================================================================================

CONFIGURE's JSON: "mode" ("serve", or "complete": run auto_complete_config and nothing else), "model_file" (path of
model.py), "model_dir" (its version directory), "args" (what `initialize` gets: all strings; "model_config" is JSON
text), "config" (mode "complete": the model configuration as an object, what ModelConfig starts from), "inputs" and
"outputs" (lists of {"name", "datatype" (number), "dims"} in the order of the indices), "max_batch_size", "decoupled",
"flags" (offset in the arena), "window" (responses that a sender may have waiting for one request), "log_verbose"
(bool), "cuda_driver" (the CUDA driver's library, to be loaded when it is first needed), "patience" (seconds for which a
worker looks for its next packet before it sleeps), "descriptors" (the folder that has the server's descriptors by their
numbers, /proc/<pid>/fd) and "arena" (the number of the arena there; both only for a process in mode "serve").

READY's JSON: {} or {"error": text (with the traceback), "code"}; "is_ready": the model has is_ready(); "regions": the
worker can open what "descriptors" has; mode "complete": "config": the object that the model returned.

CALL: "load_model" (name, config, files: {path: bytes}; the files follow the JSON, in order), "unload_model" (name,
unload_dependents), "is_model_ready" and "is_decoupled" (name, version) → bool, "metric_value" (family, labels) →
number. METRIC: {"op", "family", "kind", ...} with, for each "op": "family": "description"; "metric": "labels",
"buckets"; "increment", "set" or "observe": "labels", "value"; "delete_metric": "labels"; "delete_family": nothing else.

The worker is started as `<python> <this folder>/__main__.py WORK SIDE CALLS ARENA NAME`: the numbers of its
descriptors, and the name of the instance, for `ps`.
Its standard input is /dev/null, its standard output and error are pipes whose lines go to the server's log: they should
be line-buffered. The kernel kills the worker when its parent ends, the supervisor, which ends when the server does.
"""

from __future__ import annotations

import struct

VERSION = 8

PACKET = 64 << 10  # bytes of a packet at most
SLOT_MASK = 0xFFFF
SLOTS = SLOT_MASK + 1  # requests that a worker may hold at a time
BLS_WINDOW = 16

# -- kinds

CONFIGURE = 1
EXECUTE = 2
ALLOCATED = 3
FINALIZE = 4
FORGET = 5

HELLO = 15
READY = 16
DONE = 17
ALLOCATE = 18
FINALIZED = 19

BLS_RESPONSE = 32
CREDIT = 33
IS_READY = 34
ANSWER = 35

RESPONSE = 48
BLS_REQUEST = 49
BLS_CANCEL = 50
BLS_CREDIT = 51
RELEASE = 52
FREE = 53
LOG = 54
METRIC = 55
CALL = 56
HEALTH = 57
STATISTICS = 58

# -- flags of a head

IN_ARENA = 1  # the record lies in the arena
FAILED = 2
FINAL = 4
EMPTY = 8
KEPT = 16
DECOUPLED = 32
TRUE = 64
KEPT_GRANTS = 128

HEAD = struct.Struct("<BBHIQQ")
"""kind, flags, code, bytes of the record, id, offset"""

# -- requests, server to worker

EXECUTE_HEAD = struct.Struct("<IIQQ")
"""requests, rows over all requests, offset and bytes of the grant for outputs (0 bytes: none)"""

REQUEST = struct.Struct("<QIHHII")
"""number, flags (SEQUENCE_*), inputs, reserved, offset of EXTRA in the record (0: all its fields have their defaults),
reserved. `inputs` TENSORs with their shapes follow."""

SEQUENCE_START = 1
SEQUENCE_END = 2

EXTRA = struct.Struct("<QQQIIIIII")
"""timeout in microseconds, priority, correlation id (a number), wanted outputs (ALL_OUTPUTS: every), then the bytes of:
the request id, the correlation id (a string; 0 bytes: the number counts), the parameters (a JSON object), the trace
context (JSON), and reserved. Behind it: the indices of the wanted outputs, u16 each, then these texts in this order."""

ALL_OUTPUTS = 0xFFFFFFFF

TENSOR = struct.Struct("<HBBIQQ")
"""index in the configuration, datatype, rank, place, offset, bytes; then the shape, i64 for each dimension. Datatypes
are the numbers of DataType in model_config.proto."""

INLINE = 0
ARENA = 1
CUDA = 2
REGION = 3
INPUT = 4

CUDA_MEMORY = struct.Struct("<64sII")
"""a cudaIpcMemHandle_t, the device by the server's numbers, reserved. Follows the shape of a tensor at place CUDA."""

REGION_MEMORY = struct.Struct("<QQQII")
"""number of the region, its offset and bytes in its object, the server's descriptor of the object, whether it may stay
mapped. Follows the shape of a tensor at place REGION."""

# -- responses, worker to server

RESPONSE_HEAD = struct.Struct("<BBHIII")
"""status, code of the error, number of tensors, bytes of the error text, bytes of the parameters, bytes up to the next
RESPONSE_HEAD, this head included: a multiple of 8. Behind the head are `tensors` TENSORs with their shapes, the text,
the parameters, and INLINE data, if the worker puts them here. Only wanted outputs may be sent."""

STATUS_OK = 0
STATUS_ERROR = 1
STATUS_OPEN = 2  # None in the list: answered by a sender, before or later
STATUS_RESCHEDULE = 3  # the request is to come again; `tensors` are those of its states that have changed

STATISTICS_RECORD = struct.Struct("<IIQQ")
"""index of the response, reserved, nanoseconds until its outputs were there, and until they were given away"""

REPORTED_SUCCESS = 0
REPORTED_FAIL = 1
REPORTED_EMPTY = 2
REPORTED_CANCEL = 3

PARAMETER = struct.Struct("<HBBI")
"""bytes of the name, type, reserved, bytes of the text; then the value in 8 bytes (INT64, UINT64, DOUBLE, BOOL as
INT64; 0 for a text), the name, the text. Parameters follow each other without padding."""

PARAMETER_BOOL = 1
PARAMETER_INT64 = 2
PARAMETER_STRING = 3
PARAMETER_DOUBLE = 4
PARAMETER_UINT64 = 5

# -- BLS

BLS_HEAD = struct.Struct("<QQII")
"""number of the request on whose behalf the call is made (0: none; else it lends its deadline, its cancellation and its
trace), timeout in microseconds (0: none), bytes of the ModelInferRequest that follows, reserved"""

CALL_HEAD = struct.Struct("<Q")
"""bytes of the JSON that follows"""

# -- levels of LOG

LOG_VERBOSE = 0
LOG_INFO = 1
LOG_WARNING = 2
LOG_ERROR = 3

# -- codes of TritonError

CODE_UNKNOWN = 0
CODE_INTERNAL = 1
CODE_NOT_FOUND = 2
CODE_INVALID_ARG = 3
CODE_UNAVAILABLE = 4
CODE_UNSUPPORTED = 5
CODE_ALREADY_EXISTS = 6
CODE_CANCELLED = 7


def align(size: int) -> int:
    """The next multiple of 8."""
    return (size + 7) & -8
