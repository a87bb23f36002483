# How requests, and steps of ensembles whose model was unloaded meanwhile, wait for a model that is to be loaded: the
# question to Python, which both ask, and the lists in which the steps wait.

from libc.stdint cimport uint64_t

from inferd._native.front cimport PythonEvent
from inferd._native.protobuf.codec cimport Str

# Called in the front: the waiter must not wait. The function frees `reason`, which is from malloc; NULL: there is no
# memory.
ctypedef void (*refuse_fn)(void *waiter, int status, char *reason) noexcept nogil

cdef struct ModelAsk:
    # The question whether a waiter (a request, or a step) may wait for a model: the front asks, Python answers.
    PythonEvent event        # the first member
    void *waiter             # NULL: it waits no more
    refuse_fn refuse
    void *context            # of the waiter
    bint answered            # the event has been run: the end of the wait frees the question
    bint by_model            # see missed_fn in inferd._native.service.submission
    char *model              # from malloc, as the next
    char *asked_by           # NULL: no load waits for the response
    ModelAsk *previous       # of a request of a sequence: its neighbours in Submission.sequences
    ModelAsk *next
    uint64_t sequence        # the hash of that sequence and of the model's name

cdef struct ModelAsks:
    # a list of them; see inferd._native.list
    ModelAsk *first
    ModelAsk *last

# NULL: no memory. `event.run` and its owner are set, and the event is posted, by the caller.
cdef ModelAsk *model_ask_new(void *waiter, refuse_fn refuse, Str model, bint by_model,
                             const char *asked_by) noexcept nogil
# The waiter waits no more. NULL is allowed.
cdef void model_ask_end(ModelAsk *ask) noexcept nogil
# The event has been run. If the status is STATUS_OK the waiter may wait, else `refuse` is called.
cdef void model_ask_answer(ModelAsk *ask, int status, char *reason) noexcept nogil

cdef struct ModelWait:
    ModelWait *previous
    ModelWait *next
    ModelWaits *waits        # the list in which it waits; NULL: it does not wait
    Str model                # the bytes stay at least as long as the wait
    void *owner
    ModelAsk *ask            # until the wait ends
    # Called in the front: the model is there, or (a status other than OK) its load has failed. The wait has ended.
    void (*resume)(ModelWait *wait, int status, const char *details) noexcept nogil

cdef struct ModelWaits:
    # a list of them, in order; used in the front
    ModelWait *first
    ModelWait *last

cdef void model_waits_add(ModelWaits *waits, ModelWait *wait) noexcept nogil
# End a wait before it is resumed.
cdef void model_waits_remove(ModelWait *wait) noexcept nogil
# Whether something waits for this model.
cdef bint model_waits_for(const ModelWaits *waits, const Str *model) noexcept nogil
# Resume the waits for this model (NULL: for any), in order. Waits that begin meanwhile are not resumed.
cdef void model_waits_resume(ModelWaits *waits, const Str *model, int status, const char *details) noexcept nogil
