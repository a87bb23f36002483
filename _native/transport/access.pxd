# Who may call what: the one judge of both front doors.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from _native.protobuf.codec cimport Str

cdef enum:
    MAX_SECRET = 256         # bytes of a token or of a header's value
    TRUSTED = 2              # the caller whom nobody asks who it is; ids of tokens are odd

cdef struct Secret:
    size_t size
    uint8_t bytes[MAX_SECRET]    # zero behind `size`

cdef struct Rights:
    # what a caller may do
    uint64_t id              # of the token, the same after every reading of the file; never 0
    Secret token
    uint32_t groups          # bits of the RPC groups
    char **models            # patterns of model names; NULL: every model
    uint32_t model_count

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
    RESTRICTED

cdef struct Gate:
    # Used on the event loop only.
    Restriction *restrictions
    uint32_t restriction_count
    bint tokens_needed
    Rights *tokens
    uint32_t token_count
    Rights anonymous         # of callers without a token; no groups: there must be one
    bint triton_codes        # every refusal is UNAVAILABLE, as in Triton

# Whether a call of this group (one bit) with these headers may go on; `caller` is who makes it, 0 for nobody known.
cdef Verdict gate_judge(const Gate *gate, uint32_t group, const Field *fields, size_t count,
                        uint64_t *caller) noexcept nogil
# Whether a caller that was allowed before may use this model now.
cdef Verdict gate_model(const Gate *gate, uint64_t caller, Str model) noexcept nogil
# The status of a refusal, and its text from malloc (NULL: no memory). `group` and `model` are what was asked for.
cdef int gate_status(const Gate *gate, Verdict verdict) noexcept nogil
cdef char *gate_text(const Gate *gate, Verdict verdict, uint32_t group, Str model) noexcept nogil
# Whether gate_judge looks at this header for calls of the group.
cdef bint gate_wants(const Gate *gate, uint32_t group, const uint8_t *name, size_t size) noexcept nogil


cdef struct Passage:
    # what the native calls of one listener must pass
    const Gate *gate
    uint32_t groups          # bits of the RPC groups that are served there
    bint trusted             # nobody is asked for a token or for the header of a restricted protocol


cdef class Judge:
    # owns a Gate for Python
    cdef Gate gate
    cdef bytes key           # of the tokens' ids
    cdef void clear_tokens(self, Rights *tokens, uint32_t count) noexcept
    cdef tuple told(self, Verdict verdict, uint32_t group, bytes model)
