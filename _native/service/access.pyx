"""The rules of access: which callers may make which calls.

There are two kinds of rules; both may be set. A *restriction* is Triton's: calls of some RPC groups need a header with
a value. A *token* identifies a caller and its RPC groups and models. A call must pass all rules that concern it.

Values of headers are compared in constant time; tokens are found by a keyed hash (`inferd._native.service.tokens`). No
text of an error contains either.

`inferd._native.service.authorizer` applies the rules. It checks a call when its headers are complete, before a message
is received, and keeps the caller's id only. Each message is checked again when it has come: by group and by model, both
by the line of the token file that is in force then. So a changed or removed line takes effect with the next message,
also in an open stream.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from inferd._native.protobuf.codec cimport Str
from inferd._native.refusal cimport REFUSAL_NOT_ALLOWED, REFUSAL_UNKNOWN_CALLER, Refusal
from inferd._native.service.tokens cimport MAX_SECRET, Rights, tokens_find, tokens_of_id
from inferd._native.text cimport clip, format_text

cdef enum:
    STATUS_PERMISSION_DENIED = 7
    STATUS_UNAUTHENTICATED = 16
    GROUP_COUNT = 10

cdef extern from *:
    """
    static const char *const inferd_groups[10] = {
        "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
        "logging", "reflection"};
    """
    const char *GROUP_TEXT "inferd_groups"[10]


# ---------------------------------------------------------------------------------------------------------------------
# Comparing

cdef void secret_set(Secret *secret, const uint8_t *bytes_, size_t size) noexcept nogil:
    memset(secret, 0, sizeof(Secret))
    secret.size = size
    if size <= MAX_SECRET:
        memcpy(secret.bytes, bytes_, size)


cdef inline bint secret_equal(const Secret *a, const Secret *b) noexcept nogil:
    cdef uint32_t difference = <uint32_t>(a.size ^ b.size)
    cdef int i
    for i in range(MAX_SECRET):
        difference |= a.bytes[i] ^ b.bytes[i]
    return difference == 0


cdef bint glob(const char *pattern, const char *text, size_t size) noexcept nogil:
    # '*' is any run of characters, '?' any one byte
    cdef const char *star = NULL
    cdef size_t at = 0
    cdef size_t star_at = 0
    while at < size:
        if pattern[0] == c"*":
            star = pattern
            star_at = at
            pattern += 1
        elif pattern[0] == c"?" or (pattern[0] and pattern[0] == text[at]):
            pattern += 1
            at += 1
        elif star != NULL:
            star_at += 1
            at = star_at
            pattern = star + 1
        else:
            return False
    while pattern[0] == c"*":
        pattern += 1
    return pattern[0] == 0


cdef inline bint is_named(const Field *field, const char *name, size_t size) noexcept nogil:
    return field.name_size == size and memcmp(field.name, name, size) == 0


cdef const Field *only(const Field *fields, size_t count, const char *name, size_t size) noexcept nogil:
    # the field with this name; NULL: there is none, or there are several
    cdef const Field *found = NULL
    cdef size_t i
    for i in range(count):
        if is_named(&fields[i], name, size):
            if found != NULL:
                return NULL
            found = &fields[i]
    return found


cdef inline bint is_bearer(const uint8_t *value) noexcept nogil:
    # the scheme's name is not case-sensitive
    cdef const char *scheme = "bearer "
    cdef int i
    for i in range(7):
        if (value[i] | 0x20) != <uint8_t>scheme[i]:
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Decisions

cdef Verdict authorize_token(const AccessPolicy *access, uint32_t group, const Field *fields, size_t count,
                             uint64_t *caller) noexcept nogil:
    cdef const Rights *rights
    cdef const Field *field = only(fields, count, "authorization", 13)
    cdef uint64_t id
    cdef size_t i
    if field == NULL:
        for i in range(count):
            if is_named(&fields[i], "authorization", 13):
                return UNKNOWN_TOKEN  # there are several
        return ALLOWED if access.tokens.anonymous.groups & group else NO_TOKEN
    if field.value_size < 8 or not is_bearer(field.value):
        return UNKNOWN_TOKEN
    rights = tokens_find(access.tokens, field.value + 7, field.value_size - 7, &id)
    if rights == NULL:
        return UNKNOWN_TOKEN
    caller[0] = id
    return ALLOWED if rights.groups & group else GROUP_DENIED


cdef Verdict access_authorize(const AccessPolicy *access, uint32_t group, const Field *fields, size_t count,
                              uint64_t *caller) noexcept nogil:
    cdef const Restriction *restriction
    cdef const Field *field
    cdef Secret given
    cdef uint32_t i
    caller[0] = 0
    for i in range(access.restriction_count):
        restriction = &access.restrictions[i]
        if not restriction.groups & group:
            continue
        field = only(fields, count, restriction.header, restriction.header_size)
        if field == NULL:
            return RESTRICTED
        secret_set(&given, field.value, field.value_size)
        if not secret_equal(&restriction.value, &given):
            return RESTRICTED
    return authorize_token(access, group, fields, count, caller) if access.tokens != NULL else ALLOWED


cdef Verdict access_rights(const AccessPolicy *access, uint64_t caller, const Rights **rights) noexcept nogil:
    # The rights of a caller now; NULL if there are none. Returns the reason for a refusal.
    if caller == 0:
        rights[0] = &access.tokens.anonymous
        return NO_TOKEN
    rights[0] = tokens_of_id(access.tokens, caller)
    return UNKNOWN_TOKEN if rights[0] == NULL else GROUP_DENIED  # NULL: the token was removed


cdef Verdict access_message(const AccessPolicy *access, uint64_t caller, uint32_t group, Str model) noexcept nogil:
    cdef const Rights *rights
    cdef Verdict denied
    cdef uint32_t i
    if access.tokens == NULL or caller == TRUSTED:
        return ALLOWED
    denied = access_rights(access, caller, &rights)
    if rights == NULL or not rights.groups & group:
        return denied
    if rights.models == NULL or model.size == 0:
        return ALLOWED
    for i in range(rights.model_count):
        if glob(rights.models[i], model.data, model.size):
            return ALLOWED
    return MODEL_DENIED if caller else MODEL_NEEDS_TOKEN


cdef Verdict access_every_model(const AccessPolicy *access, uint64_t caller) noexcept nogil:
    cdef const Rights *rights
    cdef Verdict denied
    cdef uint32_t i
    if access.tokens == NULL or caller == TRUSTED:
        return ALLOWED
    denied = access_rights(access, caller, &rights)
    if rights == NULL:
        return denied
    if rights.models == NULL:
        return ALLOWED
    for i in range(rights.model_count):
        if rights.models[i][0] == c"*" and rights.models[i][1] == 0:
            return ALLOWED
    return MODEL_DENIED if caller else MODEL_NEEDS_TOKEN


cdef Verdict access_override(const AccessPolicy *access, uint64_t caller) noexcept nogil:
    cdef const Rights *rights
    if caller == TRUSTED:
        return ALLOWED
    if access.tokens == NULL:
        return ALLOWED if access.overrides else OVERRIDE_DENIED
    access_rights(access, caller, &rights)
    if rights != NULL and rights.overrides:
        return ALLOWED
    return OVERRIDE_DENIED if caller else OVERRIDE_NEEDS_TOKEN


cdef Refusal access_refusal(Verdict verdict) noexcept nogil:
    if verdict == GROUP_DENIED or verdict == MODEL_DENIED or verdict == OVERRIDE_DENIED:
        return REFUSAL_NOT_ALLOWED
    return REFUSAL_UNKNOWN_CALLER


cdef const char *group_text(uint32_t group) noexcept nogil:
    cdef int i
    for i in range(GROUP_COUNT):
        if group >> i & 1:
            return GROUP_TEXT[i]
    return "unclassified"


cdef char *access_text(const AccessPolicy *access, Verdict verdict, uint32_t group, Str model) noexcept nogil:
    cdef uint32_t i
    if verdict == NO_TOKEN:
        return format_text("%s calls need a token: expecting header 'authorization: Bearer <token>'", group_text(group))
    if verdict == UNKNOWN_TOKEN:
        return format_text("the token is not known: expecting one header 'authorization: Bearer <token>'")
    if verdict == GROUP_DENIED:
        return format_text("the token does not allow %s calls", group_text(group))
    if verdict == MODEL_NEEDS_TOKEN and model.size == 0:
        return format_text("what concerns all models needs a token: expecting header 'authorization: Bearer <token>'")
    if verdict == MODEL_NEEDS_TOKEN:
        return format_text("model '%.*s' needs a token: expecting header 'authorization: Bearer <token>'",
                           clip(model), model.data)
    if verdict == MODEL_DENIED and model.size == 0:
        return format_text("the token does not allow what concerns all models: expecting one without 'models='")
    if verdict == MODEL_DENIED:
        return format_text("the token does not allow model '%.*s'", clip(model), model.data)
    if verdict == OVERRIDE_NEEDS_TOKEN:
        return format_text("loads with a configuration or files of their own need a token with the right 'overrides': "
                           "expecting header 'authorization: Bearer <token>'")
    if verdict == OVERRIDE_DENIED and access.tokens != NULL:
        return format_text("the token does not allow loads with a configuration or files of their own: expecting "
                           "the right 'overrides'")
    if verdict == OVERRIDE_DENIED:
        return format_text("loads with a configuration or files of their own are off: expecting "
                           "--model-load-overrides")
    for i in range(access.restriction_count):
        if access.restrictions[i].groups & group:
            return format_text("This protocol is restricted, expecting header '%s'", access.restrictions[i].header)
    return NULL


cdef bint access_wants(const AccessPolicy *access, uint32_t group, const uint8_t *name, size_t size) noexcept nogil:
    cdef uint32_t i
    if access.tokens != NULL and size == 13 and memcmp(name, "authorization", 13) == 0:
        return True
    for i in range(access.restriction_count):
        if (access.restrictions[i].groups & group and access.restrictions[i].header_size == size
                and memcmp(name, access.restrictions[i].header, size) == 0):
            return True
    return False


def glob_matches(pattern: str, text: str) -> bool:
    """Whether a model pattern matches a name; for tests."""
    cdef bytes encoded = text.encode()
    return glob(pattern.encode(), encoded, len(encoded))
