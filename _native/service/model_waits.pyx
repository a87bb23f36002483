"""Waits for models that are being loaded. Requests wait in `inferd._native.service.submission`."""

from libc.string cimport memcmp

from inferd._native.list cimport list_append, list_remove
from inferd._native.protobuf.codec cimport Str


cdef inline bint is_for(const ModelWait *wait, const Str *model) noexcept nogil:
    return model == NULL or (
        wait.model.size == model.size and memcmp(wait.model.data, model.data, model.size) == 0)


cdef void model_waits_add(ModelWaits *waits, ModelWait *wait) noexcept nogil:
    wait.waits = waits
    list_append(waits, wait)


cdef void model_waits_remove(ModelWait *wait) noexcept nogil:
    list_remove(wait.waits, wait)
    wait.waits = NULL


cdef bint model_waits_for(const ModelWaits *waits, const Str *model) noexcept nogil:
    cdef const ModelWait *wait = waits.first
    while wait != NULL:
        if is_for(wait, model):
            return True
        wait = wait.next
    return False


cdef void model_waits_resume(ModelWaits *waits, const Str *model, int status, const char *details) noexcept nogil:
    # A resumed wait may end others and begin new ones. So the due waits move to a list of their own, from which they
    # can be removed.
    cdef ModelWaits due
    cdef ModelWait *wait = waits.first
    cdef ModelWait *following
    due.first = due.last = NULL
    while wait != NULL:
        following = wait.next
        if is_for(wait, model):
            model_waits_remove(wait)
            model_waits_add(&due, wait)
        wait = following
    while due.first != NULL:
        wait = due.first
        model_waits_remove(wait)
        wait.resume(wait, status, details)
