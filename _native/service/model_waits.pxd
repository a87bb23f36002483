# Waits for a model to be loaded that are not requests themselves: steps of ensembles whose model was unloaded
# meanwhile.

from inferd._native.protobuf.codec cimport Str

cdef struct ModelWait:
    ModelWait *previous
    ModelWait *next
    ModelWaits *waits        # where it waits; NULL: nowhere
    Str model                # lives as long as the wait
    void *owner
    # Called on the loop: the model is there, or (a status other than OK) its load has failed. The wait has ended.
    void (*resume)(ModelWait *wait, int status, const char *details) noexcept nogil

cdef struct ModelWaits:
    # a list of them, in order; used on the loop
    ModelWait *first
    ModelWait *last

cdef void model_waits_add(ModelWaits *waits, ModelWait *wait) noexcept nogil
# End a wait before it is resumed.
cdef void model_waits_remove(ModelWait *wait) noexcept nogil
# Whether something waits for this model.
cdef bint model_waits_for(const ModelWaits *waits, const Str *model) noexcept nogil
# Resume the waits for this model (NULL: for any), in order. Waits that begin meanwhile are not resumed.
cdef void model_waits_resume(ModelWaits *waits, const Str *model, int status, const char *details) noexcept nogil
