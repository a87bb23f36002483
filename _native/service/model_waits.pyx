"""Waits for models that are being loaded. Requests wait in `inferd._native.service.submission`."""

from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from inferd._native.list cimport list_append, list_remove
from inferd._native.protobuf.codec cimport Str
from inferd._native.status cimport STATUS_OK
from inferd._native.text cimport format_text


cdef void ask_free(ModelAsk *ask) noexcept nogil:
    free(ask.model)
    free(ask.asked_by)
    free(ask)


cdef ModelAsk *model_ask_new(void *waiter, refuse_fn refuse, Str model, bint by_model,
                             const char *asked_by) noexcept nogil:
    cdef ModelAsk *ask = <ModelAsk *>calloc(1, sizeof(ModelAsk))
    if ask == NULL:
        return NULL
    ask.waiter = waiter
    ask.refuse = refuse
    ask.by_model = by_model
    ask.model = format_text("%.*s", <int>model.size, model.data)
    if asked_by != NULL:
        ask.asked_by = format_text("%s", asked_by)
    if ask.model == NULL or (asked_by != NULL and ask.asked_by == NULL):
        ask_free(ask)
        return NULL
    return ask


cdef void model_ask_end(ModelAsk *ask) noexcept nogil:
    if ask == NULL:
        return
    ask.waiter = NULL
    if ask.answered:
        ask_free(ask)


cdef void model_ask_answer(ModelAsk *ask, int status, char *reason) noexcept nogil:
    ask.answered = True
    if ask.waiter == NULL:
        free(reason)
        ask_free(ask)
    elif status != STATUS_OK:
        ask.refuse(ask.waiter, status, reason)


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
