# Instances whose work is done in another process: the loop can begin and end an execution without waiting for it.

from _native.execution.batch cimport NativeBatch
from _native.request.request cimport Request
from _native.scheduling.dispatcher cimport Consumer

cdef enum Progress:
    UNDER_WAY                # more is to be read
    ENDED                    # every wanted output is set, or the batch or its requests have failed
    BLOCKED                  # what comes next may take time: the executor, on the instance's thread, does all the rest

cdef struct Remote:
    # What a backend offers for one instance beside its executor, with the same context: steps that never wait, on the
    # loop.
    void *context
    bint (*ready)(void *context) noexcept nogil      # an execution can begin now
    Progress (*begin)(NativeBatch *batch, void *context) noexcept nogil
    Progress (*advance)(NativeBatch *batch, void *context) noexcept nogil
    # Set by the instance; called by the backend on the loop whenever there may be something to read. NULL: nobody
    # reads.
    void (*readable)(void *owner) noexcept nogil
    void *owner

cdef struct RemoteInstance:
    # an instance with a Remote
    Remote *remote
    Consumer *consumer
    NativeBatch *batch
    const char *name
    bint running             # the loop's: the batch is under way
    bint begun               # the thread is called to end a batch that the loop has begun

# Let the loop use the instance whenever its thread waits for a batch. Before the thread runs.
cdef void remote_connect(RemoteInstance *self) noexcept nogil
# No more: the thread has left its lane.
cdef void remote_disconnect(RemoteInstance *self) noexcept nogil
