# Instances whose work runs in another process, or is brief: the front can begin and end an execution without waiting.

from libc.stddef cimport size_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.request.request cimport Request
from inferd._native.scheduling.dispatcher cimport Consumer

cdef enum Progress:
    UNDER_WAY                # more is to be read
    ENDED                    # every wanted output is set, or the batch or its requests have failed
    BLOCKED                  # the next step may take time: the executor does the rest on the instance's thread

cdef struct Remote:
    # What a backend offers for one instance beside its executor, with the same context: steps for the front, which do
    # not wait.
    void *context
    bint (*ready)(void *context) noexcept nogil      # whether an execution can begin now
    Progress (*begin)(NativeBatch *batch, void *context) noexcept nogil
    Progress (*advance)(NativeBatch *batch, void *context) noexcept nogil
    # Set by the instance. The backend calls it in the front when there may be something to read. NULL: the front reads
    # nothing.
    void (*readable)(void *owner) noexcept nogil
    void *owner

cdef struct RemoteInstance:
    # an instance with a Remote
    Remote *remote
    size_t most              # bytes of inputs of a batch that the front begins
    Consumer *consumer
    NativeBatch *batch
    const char *name
    bint running             # for the front: a batch is being executed
    bint begun               # the thread is called to end a batch that the front has begun

# Let the front use the instance while its thread waits for a batch. To be called before the thread runs.
cdef void remote_connect(RemoteInstance *self) noexcept nogil
# The opposite: the thread has left its lane.
cdef void remote_disconnect(RemoteInstance *self) noexcept nogil
