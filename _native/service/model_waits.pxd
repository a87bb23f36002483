# What waits for a model to be loaded and is no request of its own: steps of ensembles whose model was unloaded
# meanwhile.

from _native.protobuf.codec cimport Str

cdef struct ModelWait:
    ModelWait *previous
    ModelWait *next
    ModelWaits *waits        # where it waits; NULL: nowhere
    Str model                # lives as long as the wait
    void *owner
    # On the loop: the model is there, or (a status other than OK) its load has failed. It waits no more.
    void (*resume)(ModelWait *wait, int status, const char *details) noexcept nogil

cdef struct ModelWaits:
    # a list of them, in order; used on the loop
    ModelWait *first
    ModelWait *last

cdef void model_waits_add(ModelWaits *waits, ModelWait *wait) noexcept nogil
# The opposite, before it is resumed.
cdef void model_waits_remove(ModelWait *wait) noexcept nogil
# Whether something waits for this model.
cdef bint model_waits_for(const ModelWaits *waits, const Str *model) noexcept nogil
# Resume what waits for this model (NULL: for any), in order. What begins to wait meanwhile goes on waiting.
cdef void model_waits_resume(ModelWaits *waits, const Str *model, int status, const char *details) noexcept nogil
