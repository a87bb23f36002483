"""The authorizer: applies the rules of access (`inferd._native.service.access`) to the calls of both front doors.

For native calls it is the interceptor of their endpoint or listener. For other calls the front doors call its methods.
It notes refusals for the log.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post
from inferd._native.memory.resource cimport Block, block_give, block_share
from inferd._native.protobuf.codec cimport Str
from inferd._native.refusal cimport REFUSAL_NOT_SERVED, Refusal, refusal_status
from inferd._native.service.access cimport (
    ALLOWED,
    INFERENCE,
    TRUSTED,
    UNKNOWN_TOKEN,
    AccessPolicy,
    Field,
    Restriction,
    Secret,
    Verdict,
    access_authorize,
    access_every_model,
    access_has_rules,
    access_message,
    access_override,
    access_refusal,
    access_text,
    access_wants,
    group_text,
    secret_set,
)
from inferd._native.service.tokens cimport MAX_SECRET, TokenTable, group_bits
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.transport.endpoint cimport Endpoint, InterceptorHandle
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.headers cimport header_value
from inferd._native.transport.nghttp2 cimport nghttp2_rcbuf_get_buf, nghttp2_vec
from inferd._native.transport.stream cimport Stream

import os

from inferd._native.service.tokens import GROUPS

TRUSTED_CALLER = <int>TRUSTED

cdef enum:
    KEPT_FIELDS = 16         # headers of a call that are examined; a call with more is refused as ambiguous
    MAX_NOTES = 16           # different refusals that are kept between two calls of take_notes
    MAX_NOTED = 1000         # refusals that are examined for that; more are only counted


# ---------------------------------------------------------------------------------------------------------------------
# Native calls, which are all inference

cdef bint wants_field(void *context, const uint8_t *name, size_t size) noexcept nogil:
    return access_has_rules(<AccessPolicy *>context) and access_wants(<AccessPolicy *>context, INFERENCE, name, size)


cdef bint admits(void *context, Stream *stream) noexcept nogil:
    return authorize_stream(<AccessPolicy *>context, stream)


cdef bint authorize_stream(AccessPolicy *access, Stream *stream) noexcept nogil:
    cdef Field fields[KEPT_FIELDS]
    cdef nghttp2_vec name, value
    cdef Verdict verdict = UNKNOWN_TOKEN
    cdef size_t count = 0
    cdef uint32_t i
    if not access_has_rules(access):
        stream.caller = 0
        return True
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        value = header_value(stream.fields[i].value)
        if not access_wants(access, INFERENCE, name.base, name.len):
            continue  # kept for another part of the server
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
    stream_refuse(stream, access_refusal(verdict), text)


cdef struct DenialNote:
    # a refusal of a native call, for Authorizer.note
    PythonEvent event        # the first member
    Block *peer
    const char *path         # of the endpoint's method
    char *text               # from malloc
    int64_t user


cdef void access_note(AccessPolicy *access, const Stream *stream, const char *text) noexcept nogil:
    cdef DenialNote *note = NULL
    if access.noted < MAX_NOTED and access.authorizer != NULL and text != NULL:
        note = <DenialNote *>calloc(1, sizeof(DenialNote))
    if note == NULL:
        access.left_out += 1
        return
    access.noted += 1
    note.event.run = tell_denial
    note.event.owner = access.authorizer
    note.peer = block_share(stream.conn.peer) if stream.conn.peer != NULL else NULL
    note.path = stream.method.path
    note.text = format_text("%s", text)
    note.user = stream.conn.user
    python_post(&stream.conn.host.timers.python, &note.event)


cdef int tell_denial(PythonEvent *event) except -1:
    cdef DenialNote *note = <DenialNote *>event
    cdef Authorizer authorizer = <Authorizer>event.owner
    front_leave()
    try:
        authorizer.remember(note.peer.data.decode("utf-8", "replace") if note.peer != NULL else "",
                            note.path.decode("utf-8", "replace"),
                            text_or_no_memory(note.text).decode("utf-8", "replace"), note.user)
    finally:
        block_give(note.peer)
        free(note.text)
        free(note)
    return 0


# Native calls of one listener

cdef bint listener_wants(void *context, const uint8_t *name, size_t size) noexcept nogil:
    cdef const ListenerAccess *listener = <const ListenerAccess *>context
    return not listener.trusted and access_wants(listener.access, INFERENCE, name, size)


cdef bint listener_admits(void *context, Stream *stream) noexcept nogil:
    cdef const ListenerAccess *listener = <const ListenerAccess *>context
    cdef char *text
    if not listener.groups & INFERENCE:
        text = format_text("%s calls are not served at this address", group_text(INFERENCE))
        access_note(listener.access, stream, text)
        stream_refuse(stream, REFUSAL_NOT_SERVED, text)
        return False
    if listener.trusted:
        stream.caller = TRUSTED
        return True
    return authorize_stream(listener.access, stream)


# ---------------------------------------------------------------------------------------------------------------------
# The authorizer

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
    """Applies the rules of a server. Without rules everything is allowed, except overrides of loads.

    Used on the event loop only.

    Args:
        restrictions: (groups, header name, value) of Triton's restricted protocols.
        overrides: callers that need no token may send a configuration and files with a load.
    """

    def __init__(self, restrictions=(), *, overrides: bool = False):
        cdef Restriction *restriction
        self.key = os.urandom(16)
        self.notes = {}
        self.access.authorizer = <void *>self
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
        """Require a token of this table from now on. The table must have been made with this authorizer's `key`."""
        front_enter()
        self.access.tokens = &table.tokens
        self.table, table = table, self.table  # so the former table is freed after front_leave
        front_leave()

    def note(self, peer: str, method: str, text: str, int64_t user=-1) -> None:
        """Note a refusal for the log; `user` is the user of the peer's process, -1 if the kernel does not know it."""
        front_enter()
        self.access.noted += 1
        front_leave()
        self.remember(peer, method, text, user)

    cdef int remember(self, str peer, str method, str text, int64_t user) except -1:
        key = (peer if user < 0 else f"{peer} user {user}", method, text)
        if self.on_note is not None:
            self.on_note()
        if key in self.notes or len(self.notes) < MAX_NOTES:
            self.notes[key] = self.notes.get(key, 0) + 1
        else:
            front_enter()
            self.access.left_out += 1
            front_leave()
        return 0

    def take_notes(self) -> tuple[dict[tuple[str, str, str], int], int]:
        """The refusals since the last call: their number by (peer, method, text), and the number of others."""
        notes = self.notes
        self.notes = {}
        front_enter()
        left_out = self.access.left_out
        self.access.noted = 0
        self.access.left_out = 0
        front_leave()
        return (notes, left_out)

    def install(self, Endpoint endpoint not None) -> None:
        """Check the native calls of an endpoint, which must not outlive this object."""
        endpoint.host.interceptor.wants = wants_field
        endpoint.host.interceptor.admits = admits
        endpoint.host.interceptor.context = &self.access

    def authorize(self, group: str, metadata) -> tuple[int, str, int, int]:
        """Check a call of this group: (status, text, refusal, caller); the status is 0 if the call is allowed.

        The refusal is a number in the table of refusals. The same holds for the methods below.
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

    def authorize_message(self, caller: int, group: str, model: str) -> tuple[int, str, int]:
        """Check a message of a caller whose call was allowed: (status, text, refusal). The model is "" for none."""
        cdef bytes encoded = model.encode()
        cdef uint32_t bit = 1 << GROUPS.index(group)
        cdef Str name
        name.data = encoded
        name.size = <uint32_t>len(encoded)
        return self.told(access_message(&self.access, caller, bit, name), bit, encoded)

    def authorize_every_model(self, caller: int) -> tuple[int, str, int]:
        """Check a message that concerns all models, of a caller whose call was allowed: (status, text, refusal)."""
        return self.told(access_every_model(&self.access, caller), 0, b"")

    def authorize_override(self, caller: int) -> tuple[int, str, int]:
        """Check a load with a configuration or files, which can run code in the server: (status, text, refusal)."""
        return self.told(access_override(&self.access, caller), 0, b"")

    cdef tuple told(self, Verdict verdict, uint32_t group, bytes model):
        # the status of a verdict, its text, and the refusal
        cdef Str name
        cdef char *text
        cdef Refusal refusal = access_refusal(verdict)
        if verdict == ALLOWED:
            return (0, "", 0)
        name.data = model
        name.size = <uint32_t>len(model)
        text = access_text(&self.access, verdict, group, name)
        try:
            return refusal_status(refusal), text_or_no_memory(text).decode("utf-8", "replace"), <int>refusal
        finally:
            free(text)


cdef class ListenerInterceptor(InterceptorHandle):
    """The check of the native calls of one listener.

    Args:
        authorizer: applies the rules of the server.
        groups: the RPC groups that the listener serves.
        trusted: callers need no token and no header of a restricted protocol.
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
