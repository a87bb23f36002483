"""The tokens of callers, found in a time that does not depend on their number.

A thread builds a table while another table is in force; a table in force is never changed. So however large the file
is, the front only exchanges one pointer.

The id of a token is its SipHash-2-4 with a key of the process. It stands for the caller between two messages of a
call, and is the same in every table with the same key.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from inferd._native.siphash cimport siphash

# The RPC groups in the order of their bits; Triton's, and reflection.
GROUPS = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
    "logging", "reflection",
)

cdef enum:
    FIRST_PLACES = 64
    FIRST_TEXT = 1 << 12
    RESERVED = 2             # no token has an id up to this: 0 is an unknown caller or a free place, 2 access.TRUSTED


# ---------------------------------------------------------------------------------------------------------------------
# Ids

cdef inline uint64_t id_of(const Tokens *tokens, const uint8_t *text, size_t size) noexcept nogil:
    cdef uint64_t found = siphash(tokens.key, text, size)
    return found if found > RESERVED else found + RESERVED + 1


# ---------------------------------------------------------------------------------------------------------------------
# Finding

cdef inline bint is_equal(const uint8_t *a, const uint8_t *b, size_t size) noexcept nogil:
    # in a time that does not depend on where they differ
    cdef uint8_t difference = 0
    cdef size_t i
    for i in range(size):
        difference |= a[i] ^ b[i]
    return difference == 0


cdef const Token *place_of(const Tokens *tokens, uint64_t id) noexcept nogil:
    # where the token with this id is, or would be; NULL: there are no places
    cdef uint32_t at
    if tokens.place_count == 0:
        return NULL
    at = <uint32_t>id & (tokens.place_count - 1)
    while tokens.places[at].id != 0 and tokens.places[at].id != id:
        at = (at + 1) & (tokens.place_count - 1)
    return &tokens.places[at]


cdef const Rights *tokens_find(const Tokens *tokens, const uint8_t *text, size_t size, uint64_t *id) noexcept nogil:
    cdef const Token *token
    if size == 0 or size > MAX_SECRET:
        return NULL
    id[0] = id_of(tokens, text, size)
    token = place_of(tokens, id[0])
    if token == NULL or token.id == 0 or token.size != size:
        return NULL
    if not is_equal(tokens.texts + token.offset, text, size):
        return NULL
    return &tokens.rights[token.rights]


cdef const Rights *tokens_of_id(const Tokens *tokens, uint64_t id) noexcept nogil:
    cdef const Token *token = place_of(tokens, id)
    return &tokens.rights[token.rights] if token != NULL and token.id != 0 else NULL


# ---------------------------------------------------------------------------------------------------------------------
# Building

cdef uint32_t group_bits(groups) except? 0xffffffff:
    cdef uint32_t bits = 0
    for group in groups:
        bits |= 1 << GROUPS.index(group)
    return bits


cdef int rights_fill(Rights *rights, groups, models, bint overrides) except -1:
    cdef bytes pattern
    cdef uint32_t i
    rights.groups = group_bits(groups)
    rights.overrides = overrides
    if models is None:
        return 0
    rights.models = <char **>calloc(max(1, len(models)), sizeof(char *))
    if rights.models == NULL:
        raise MemoryError
    for i in range(len(models)):
        pattern = models[i].encode()
        rights.models[i] = <char *>malloc(len(pattern) + 1)
        if rights.models[i] == NULL:
            raise MemoryError
        memcpy(rights.models[i], <const char *>pattern, len(pattern) + 1)
        rights.model_count = i + 1
    return 0


cdef void rights_clear(Rights *rights) noexcept:
    cdef uint32_t i
    for i in range(rights.model_count):
        free(rights.models[i])
    free(rights.models)
    memset(rights, 0, sizeof(Rights))


cdef class TokenTable:
    """Tokens and their rights. It is filled by one thread; when an authorizer has it, it does not change any more.

    Args:
        key: 16 secret bytes; tables with the same key give a token the same id.
    """

    def __init__(self, key: bytes):
        if len(key) != 16:
            raise ValueError(f"expected a key of 16 bytes, got {len(key)}")
        self.tokens.key[0] = int.from_bytes(key[:8], "little")
        self.tokens.key[1] = int.from_bytes(key[8:], "little")

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.tokens.rights_count):
            rights_clear(&self.tokens.rights[i])
        rights_clear(&self.tokens.anonymous)
        free(self.tokens.rights)
        free(self.tokens.places)
        free(self.tokens.texts)

    def __len__(self) -> int:
        return self.tokens.count

    def allow_anybody(self, groups, models=None, *, overrides: bool = False) -> None:
        """Set the rights of callers without a token, once; without this call they have none."""
        rights_clear(&self.tokens.anonymous)
        rights_fill(&self.tokens.anonymous, groups, models, overrides)

    def add_rights(self, groups, models=None, *, overrides: bool = False) -> int:
        """Add rights that tokens may have.

        Args:
            groups: names of RPC groups.
            models: patterns of model names; None for every model.
            overrides: a load may bring a configuration and files.

        Returns:
            Their number, for `add`.
        """
        cdef Rights *grown
        cdef uint32_t number = self.tokens.rights_count
        if number == self.tokens.rights_capacity:
            grown = <Rights *>realloc(self.tokens.rights, 2 * (number + 1) * sizeof(Rights))
            if grown == NULL:
                raise MemoryError
            self.tokens.rights = grown
            self.tokens.rights_capacity = 2 * (number + 1)
        memset(&self.tokens.rights[number], 0, sizeof(Rights))
        self.tokens.rights_count += 1  # before rights_fill: if that fails, __dealloc__ frees its allocations
        rights_fill(&self.tokens.rights[number], groups, models, overrides)
        return number

    def add(self, token: str, uint32_t rights) -> bool:
        """Add a token with these rights; False, and nothing happens, when it is there already.

        Raises:
            ValueError: it is empty or too long, the rights are unknown, or another token has the same id. The latter is
                too rare to be handled; it goes away when the process chooses another key.
        """
        cdef bytes encoded = token.encode()
        cdef Token *place
        cdef uint64_t number
        if not 0 < len(encoded) <= MAX_SECRET:
            raise ValueError(f"a token must have 1 to {MAX_SECRET} bytes, got {len(encoded)}")
        if rights >= self.tokens.rights_count:
            raise ValueError("these rights are not known")
        if 2 * (self.tokens.count + 1) > self.tokens.place_count:
            self.grow()
        number = id_of(&self.tokens, <const uint8_t *><const char *>encoded, len(encoded))
        place = <Token *>place_of(&self.tokens, number)
        if place.id != 0:
            if place.size != len(encoded) or not is_equal(
                    self.tokens.texts + place.offset, <const uint8_t *><const char *>encoded, place.size):
                raise ValueError("two tokens have one id")
            return False
        place.offset = self.keep_text(encoded)
        place.size = <uint16_t>len(encoded)
        place.rights = rights
        place.id = number
        self.tokens.count += 1
        return True

    cdef uint32_t keep_text(self, bytes token) except? 0xffffffff:
        # where the text of the token is kept
        cdef size_t offset = self.tokens.text_size
        cdef size_t capacity = self.tokens.text_capacity or <size_t>FIRST_TEXT
        cdef uint8_t *grown
        while offset + len(token) > capacity:
            capacity *= 2
        if capacity > 0xffffffff:
            raise MemoryError("the tokens have more than 4 GiB")
        if capacity != self.tokens.text_capacity:
            grown = <uint8_t *>realloc(self.tokens.texts, capacity)
            if grown == NULL:
                raise MemoryError
            self.tokens.texts = grown
            self.tokens.text_capacity = capacity
        memcpy(self.tokens.texts + offset, <const char *>token, len(token))
        self.tokens.text_size += len(token)
        return <uint32_t>offset

    cdef int grow(self) except -1:
        cdef Token *before = self.tokens.places
        cdef uint32_t count = self.tokens.place_count
        cdef Token *place
        cdef uint32_t i
        cdef Token *places = <Token *>calloc(max(<uint32_t>FIRST_PLACES, 2 * count), sizeof(Token))
        if places == NULL:
            raise MemoryError
        self.tokens.places = places
        self.tokens.place_count = max(<uint32_t>FIRST_PLACES, 2 * count)
        for i in range(count):
            if before[i].id != 0:
                place = <Token *>place_of(&self.tokens, before[i].id)
                place[0] = before[i]
        free(before)
        return 0
