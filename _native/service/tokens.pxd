# The tokens of callers and their rights. Any thread builds a table and hands it to the authorizer; then it is
# never changed.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    MAX_SECRET = 256         # bytes of a token or of a header's value at most

cdef struct Rights:
    # the rights in a line of the file; lines with the same rights share one
    uint32_t groups          # bits of the RPC groups
    bint overrides           # loads may contain a configuration and files
    char **models            # patterns of model names; NULL: every model
    uint32_t model_count

cdef struct Token:
    uint64_t id              # 0: the entry is empty
    uint32_t offset          # of its text
    uint16_t size
    uint32_t rights

cdef struct Tokens:
    uint64_t key[2]          # for the hash that makes ids
    Token *places            # a hash table with linear probing, at most half full
    uint32_t place_count     # a power of two
    uint32_t count
    uint8_t *texts
    size_t text_size
    size_t text_capacity
    Rights *rights
    uint32_t rights_count
    uint32_t rights_capacity
    Rights anonymous         # of callers without a token; no groups: a token is required

# The rights of this token; NULL if it is unknown. `id` becomes its id. The time tells nothing about the known tokens:
# the hash is keyed, and after an equal hash the whole text is compared.
cdef const Rights *tokens_find(const Tokens *tokens, const uint8_t *text, size_t size, uint64_t *id) noexcept nogil
# The rights that the token with this id has now; NULL if it does not exist any more.
cdef const Rights *tokens_of_id(const Tokens *tokens, uint64_t id) noexcept nogil
# The bits of these RPC groups.
cdef uint32_t group_bits(groups) except? 0xffffffff


cdef class TokenTable:
    cdef Tokens tokens
    cdef int grow(self) except -1
    cdef uint32_t keep_text(self, bytes token) except? 0xffffffff
