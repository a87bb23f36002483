"""Who may call what.

There are two kinds of rules; both may be set. A *restriction* is Triton's: calls of some RPC groups need a header with
a value. A *token* identifies a caller, who has RPC groups and models. A call must pass all rules that concern it.

Values of headers are compared in constant time; tokens are found by a keyed hash (`_native.service.tokens`). No text
and no log line contains one.

A call is checked when its headers are complete, before a message is received. Each of its messages is checked again
when it has come: by group and by model, both by the line of the token file that is in force then. In between only the
caller's id is kept. So a changed or removed line takes effect with the next message, also in an open stream.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from _native.protobuf.codec cimport Str
from _native.service.tokens cimport MAX_SECRET, Rights, TokenTable, group_bits, tokens_find, tokens_of_id
from _native.status cimport STATUS_OK, STATUS_UNAVAILABLE, STATUS_UNIMPLEMENTED
from _native.text cimport clip, format_text, text_or_no_memory
from _native.transport.connection cimport Connection, Endpoint, InterceptorHandle
from _native.transport.errorinfo cimport stream_refuse
from _native.transport.headers cimport header_value
from _native.transport.nghttp2 cimport nghttp2_rcbuf_get_buf, nghttp2_vec
from _native.transport.stream cimport Stream

import os

from _native.service.tokens import GROUPS

TRUSTED_CALLER = <int>TRUSTED

cdef enum:
    STATUS_PERMISSION_DENIED = 7
    STATUS_UNAUTHENTICATED = 16
    GROUP_COUNT = 10
    KEPT_FIELDS = 16         # of a native call; more of them are refused as ambiguous
    MAX_NOTES = 16           # different refusals that are kept between two calls of take_notes
    MAX_NOTED = 1000         # refusals that are looked at for that; more are only counted

cdef extern from *:
    """
    static const char *const inferd_groups[10] = {
        "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
        "logging", "reflection"};
    """
    const char *GROUP_TEXT "inferd_groups"[10]


# ---------------------------------------------------------------------------------------------------------------------
# Comparing

cdef inline void secret_set(Secret *secret, const uint8_t *bytes_, size_t size) noexcept nogil:
    # what is too long for a secret equals none
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
    # the field with this name; NULL when there is none or more than one
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
# Judging

cdef Verdict authorize_token(const AccessPolicy *access, uint32_t group, const Field *fields, size_t count,
                             uint64_t *caller) noexcept nogil:
    cdef const Rights *rights
    cdef const Field *field = only(fields, count, "authorization", 13)
    cdef uint64_t id
    cdef size_t i
    if field == NULL:
        for i in range(count):
            if is_named(&fields[i], "authorization", 13):
                return UNKNOWN_TOKEN  # several
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
    # the line in force for a caller; NULL when there is none
    if caller == 0:
        rights[0] = &access.tokens.anonymous
        return NO_TOKEN
    rights[0] = tokens_of_id(access.tokens, caller)
    return UNKNOWN_TOKEN if rights[0] == NULL else GROUP_DENIED  # NULL: it was taken away


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
    return MODEL_DENIED


cdef Verdict access_override(const AccessPolicy *access, uint64_t caller) noexcept nogil:
    # whether a load of this caller may bring a configuration and files
    cdef const Rights *rights
    if caller == TRUSTED:
        return ALLOWED
    if access.tokens == NULL:
        return ALLOWED if access.overrides else OVERRIDE_DENIED
    access_rights(access, caller, &rights)
    return ALLOWED if rights != NULL and rights.overrides else OVERRIDE_DENIED


cdef int access_status(const AccessPolicy *access, Verdict verdict) noexcept nogil:
    if verdict == ALLOWED:
        return STATUS_OK
    if access.triton_codes:
        return STATUS_UNAVAILABLE
    if verdict == GROUP_DENIED or verdict == MODEL_DENIED or verdict == OVERRIDE_DENIED:
        return STATUS_PERMISSION_DENIED
    return STATUS_UNAUTHENTICATED


cdef const char *access_reason(const AccessPolicy *access, Verdict verdict) noexcept nogil:
    if not access.triton_codes:
        return NULL
    if verdict == GROUP_DENIED or verdict == MODEL_DENIED or verdict == OVERRIDE_DENIED:
        return "NOT_ALLOWED"
    return "UNKNOWN_CALLER"


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
    if verdict == MODEL_DENIED:
        return format_text("the token does not allow model '%.*s'", clip(model.size), model.data)
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


# ---------------------------------------------------------------------------------------------------------------------
# Native calls: all of them are inference

cdef bint wants_field(void *context, const uint8_t *name, size_t size) noexcept nogil:
    return access_wants(<AccessPolicy *>context, INFERENCE, name, size)


cdef bint admits(void *context, Stream *stream) noexcept nogil:
    return authorize_stream(<AccessPolicy *>context, stream)


cdef bint authorize_stream(AccessPolicy *access, Stream *stream) noexcept nogil:
    cdef Field fields[KEPT_FIELDS]
    cdef nghttp2_vec name, value
    cdef Verdict verdict = UNKNOWN_TOKEN
    cdef size_t count = 0
    cdef uint32_t i
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        value = header_value(stream.fields[i].value)
        if not access_wants(access, INFERENCE, name.base, name.len):
            continue  # somebody else's
        if count < KEPT_FIELDS:
            fields[count].name = name.base
            fields[count].name_size = name.len
            fields[count].value = value.base
            fields[count].value_size = value.len
        count += 1
    if count <= KEPT_FIELDS:
        verdict = access_authorize(access, INFERENCE, fields, count, &stream.caller)
    if verdict == ALLOWED:
        return True
    access_deny(access, stream, verdict, Str(NULL, 0))
    return False


cdef void access_deny(AccessPolicy *access, Stream *stream, Verdict verdict, Str model) noexcept nogil:
    cdef char *text = access_text(access, verdict, INFERENCE, model)
    access_note(access, stream, text)
    stream_refuse(stream, access_status(access, verdict), access_reason(access, verdict), text)


cdef void access_note(AccessPolicy *access, const Stream *stream, const char *text) noexcept nogil:
    if access.noted >= MAX_NOTED or access.authorizer == NULL or text == NULL:
        access.left_out += 1
        return
    with gil:
        (<Authorizer>access.authorizer).note((<Connection>stream.conn.owner).peer,
                                             stream.method.path.decode("utf-8", "replace"),
                                             text.decode("utf-8", "replace"), stream.conn.user)


# Those of one listener

cdef bint listener_wants(void *context, const uint8_t *name, size_t size) noexcept nogil:
    cdef const ListenerAccess *listener = <const ListenerAccess *>context
    return not listener.trusted and access_wants(listener.access, INFERENCE, name, size)


cdef bint listener_admits(void *context, Stream *stream) noexcept nogil:
    cdef const ListenerAccess *listener = <const ListenerAccess *>context
    cdef char *text
    if not listener.groups & INFERENCE:
        text = format_text("%s calls are not served at this address", group_text(INFERENCE))
        access_note(listener.access, stream, text)
        stream_refuse(stream, STATUS_UNIMPLEMENTED, NULL, text)
        return False
    if listener.trusted:
        stream.caller = TRUSTED
        return True
    return authorize_stream(listener.access, stream)


# ---------------------------------------------------------------------------------------------------------------------
# Python

cdef int secret_from(Secret *secret, bytes value) except -1:
    if not 0 < len(value) <= MAX_SECRET:
        raise ValueError(f"a secret must have 1 to {MAX_SECRET} bytes, got {len(value)}")
    secret_set(secret, value, len(value))
    return 0


cdef char *copied(bytes text) except NULL:
    cdef char *copy = <char *>malloc(len(text) + 1)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, <const char *>text, len(text) + 1)
    return copy


cdef class Authorizer:
    """The rules of a server. Without any, everything but a load's overrides is allowed. Used on the event loop only.

    Args:
        restrictions: (groups, header name, value) of Triton's restricted protocols.
        triton_codes: refuse with UNAVAILABLE, as Triton does.
        overrides: without tokens, a load may bring a configuration and files.
    """

    def __init__(self, restrictions=(), *, triton_codes: bool = False, overrides: bool = False):
        cdef Restriction *restriction
        self.key = os.urandom(16)
        self.notes = {}
        self.access.authorizer = <void *>self
        self.access.triton_codes = triton_codes
        self.access.overrides = overrides
        self.access.restrictions = <Restriction *>calloc(max(1, len(restrictions)), sizeof(Restriction))
        if self.access.restrictions == NULL:
            raise MemoryError
        for groups, header, value in restrictions:
            restriction = &self.access.restrictions[self.access.restriction_count]
            restriction.groups = group_bits(groups)
            secret_from(&restriction.value, value.encode())
            restriction.header = copied(header.encode("ascii"))
            restriction.header_size = len(header)
            self.access.restriction_count += 1

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.access.restriction_count):
            free(self.access.restrictions[i].header)
        free(self.access.restrictions)

    def set_tokens(self, TokenTable table not None) -> None:
        """From now on callers need a token of these, which have the ids of this authorizer's `key`."""
        self.access.tokens = &table.tokens
        self.table = table

    def note(self, peer: str, method: str, text: str, int64_t user=-1) -> None:
        """Keep a refusal for the log; `user` is that of the peer's process, -1 where the kernel does not tell."""
        key = (peer if user < 0 else f"{peer} user {user}", method, text)
        self.access.noted += 1
        if self.on_note is not None:
            self.on_note()
        if key in self.notes or len(self.notes) < MAX_NOTES:
            self.notes[key] = self.notes.get(key, 0) + 1
        else:
            self.access.left_out += 1

    def take_notes(self) -> tuple[dict[tuple[str, str, str], int], int]:
        """The refusals since the last call: how many of (peer, method, text), and how many others."""
        notes, left_out = self.notes, self.access.left_out
        self.notes = {}
        self.access.noted = 0
        self.access.left_out = 0
        return (notes, left_out)

    def install(self, Endpoint endpoint not None) -> None:
        """Check the native calls of an endpoint, which must not outlive this object."""
        endpoint.host.interceptor.wants = wants_field
        endpoint.host.interceptor.admits = admits
        endpoint.host.interceptor.context = &self.access

    def authorize(self, group: str, metadata) -> tuple[int, str, str, int]:
        """Check a call of this group: (status, text, reason, caller); the status is 0 when it may go on.

        The reason is what ErrorInfo says; empty for what is usual for the status. So it is below.
        """
        cdef Field fields[KEPT_FIELDS]
        cdef uint32_t bit = 1 << GROUPS.index(group)
        cdef uint64_t caller = 0
        cdef Verdict verdict = UNKNOWN_TOKEN
        cdef uint32_t i
        cdef bytes name, value
        cdef list kept = []
        for key, content in metadata:
            name = key.encode()
            if access_wants(&self.access, bit, name, len(name)):
                kept.append((name, content.encode() if isinstance(content, str) else content))
        if len(kept) <= KEPT_FIELDS:
            for i in range(len(kept)):
                name, value = kept[i]
                fields[i].name = name
                fields[i].name_size = len(name)
                fields[i].value = value
                fields[i].value_size = len(value)
            verdict = access_authorize(&self.access, bit, fields, len(kept), &caller)
        return self.told(verdict, bit, b"") + (caller,)

    def authorize_message(self, caller: int, group: str, model: str) -> tuple[int, str, str]:
        """Whether a caller that was let in may send this now: (status, text, reason); the model is "" for none."""
        cdef bytes encoded = model.encode()
        cdef uint32_t bit = 1 << GROUPS.index(group)
        cdef Str name
        name.data = encoded
        name.size = <uint32_t>len(encoded)
        return self.told(access_message(&self.access, caller, bit, name), bit, encoded)

    def authorize_override(self, caller: int) -> tuple[int, str, str]:
        """Whether a load of this caller may bring a configuration and files, which is to run code, in the same way."""
        return self.told(access_override(&self.access, caller), 0, b"")

    cdef tuple told(self, Verdict verdict, uint32_t group, bytes model):
        # the status of a verdict, its text, and the reason
        cdef Str name
        cdef char *text
        cdef const char *reason = access_reason(&self.access, verdict)
        if verdict == ALLOWED:
            return (0, "", "")
        name.data = model
        name.size = <uint32_t>len(model)
        text = access_text(&self.access, verdict, group, name)
        try:
            return (access_status(&self.access, verdict), text_or_no_memory(text).decode("utf-8", "replace"),
                    reason.decode() if reason != NULL else "")
        finally:
            free(text)


cdef class ListenerInterceptor(InterceptorHandle):
    """What the native calls of one listener must pass.

    Args:
        authorizer: the rules of the server.
        groups: the RPC groups that are served there.
        trusted: nobody is asked for a token or for the header of a restricted protocol.
    """

    cdef ListenerAccess listener
    cdef Authorizer authorizer

    def __init__(self, Authorizer authorizer not None, groups=GROUPS, *, trusted: bool = False):
        self.authorizer = authorizer
        self.listener.access = &authorizer.access
        self.listener.groups = group_bits(groups)
        self.listener.trusted = trusted
        self.interceptor.wants = listener_wants
        self.interceptor.admits = listener_admits
        self.interceptor.context = &self.listener


def glob_matches(pattern: str, text: str) -> bool:
    """Whether a model pattern matches a name; for tests."""
    cdef bytes encoded = text.encode()
    return glob(pattern.encode(), encoded, len(encoded))
