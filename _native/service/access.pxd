# The rules of access: which callers may make which calls.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from inferd._native.protobuf.codec cimport Str
from inferd._native.refusal cimport Refusal
from inferd._native.service.tokens cimport MAX_SECRET, Tokens

cdef enum:
    TRUSTED = 2              # the id of callers that are never asked for a token; no token has it
    INFERENCE = 1 << 2       # the group of ModelInfer and ModelStreamInfer

cdef struct Secret:
    size_t size
    uint8_t bytes[MAX_SECRET]    # zero behind `size`

cdef struct Restriction:
    # calls of these groups need this header with this value
    char *header
    size_t header_size
    Secret value
    uint32_t groups

cdef struct Field:
    # one header of a call
    const uint8_t *name
    size_t name_size
    const uint8_t *value
    size_t value_size

cdef enum Verdict:
    ALLOWED
    NO_TOKEN
    UNKNOWN_TOKEN
    GROUP_DENIED
    MODEL_DENIED
    MODEL_NEEDS_TOKEN        # the caller has no token, and callers without one may not use the model
    OVERRIDE_DENIED
    OVERRIDE_NEEDS_TOKEN     # the caller has no token, and callers without one may not override
    RESTRICTED

cdef struct AccessPolicy:
    # Used within the front.
    Restriction *restrictions
    uint32_t restriction_count
    const Tokens *tokens     # in force; NULL: callers need no token
    bint overrides           # callers that need no token may send a configuration and files with a load
    uint32_t noted           # refusals that the log has examined
    uint64_t left_out        # refusals that it left out
    void *authorizer         # the Authorizer that owns the policy

# Whether a call of this group (one bit) with these headers is allowed; `caller` becomes its caller, 0 for unknown.
cdef Verdict access_authorize(const AccessPolicy *access, uint32_t group, const Field *fields, size_t count,
                              uint64_t *caller) noexcept nogil
# Whether a caller that was admitted before may send this message now. Group and model (empty: none) are both checked
# by the line of the token file that is in force at this moment, never by two different lines.
cdef Verdict access_message(const AccessPolicy *access, uint64_t caller, uint32_t group, Str model) noexcept nogil
# The reason of a refusal, and its text from malloc (NULL: no memory). `group` and `model` are those of the call.
cdef Refusal access_refusal(Verdict verdict) noexcept nogil
cdef char *access_text(const AccessPolicy *access, Verdict verdict, uint32_t group, Str model) noexcept nogil
# Whether access_authorize needs this header for calls of the group.
cdef bint access_wants(const AccessPolicy *access, uint32_t group, const uint8_t *name, size_t size) noexcept nogil
# Whether this caller may use every model there is.
cdef Verdict access_every_model(const AccessPolicy *access, uint64_t caller) noexcept nogil
# Whether a load of this caller may contain a configuration and files.
cdef Verdict access_override(const AccessPolicy *access, uint64_t caller) noexcept nogil
# False: access_authorize allows every call, and needs no header.
cdef inline bint access_has_rules(const AccessPolicy *access) noexcept nogil:
    return access.restriction_count > 0 or access.tokens != NULL
# The name of the group with this bit.
cdef const char *group_text(uint32_t group) noexcept nogil
# Copies `size` bytes. A text that is too long for a secret equals no other one.
cdef void secret_set(Secret *secret, const uint8_t *bytes_, size_t size) noexcept nogil
