"""Compression of whole messages with zlib, into blocks that grow with the result.

Inflating never writes a byte beyond its limit, and memory grows geometrically with the output. A gzip message states
its inflated size in its last four bytes, and gets exactly that much memory. So a bomb that states its true size is
refused before it is inflated, and one that states a false size ends at that size.

Results of MAPPED_FROM bytes and more have memory mappings of their own: these grow without a copy, untouched
pages cost nothing, and nothing stays in the pool when the message is freed.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcmp, memcpy, memset

from inferd._native.memory.resource cimport Block, block_give, block_take, block_wrap
from inferd._native.transport.outgoing cimport (
    Outgoing,
    Segment,
    outgoing_add,
    outgoing_free,
    outgoing_new,
    write_message_prefix,
)
from inferd._native.transport.zlib cimport *

cdef extern from *:
    """
    #include <sys/mman.h>
    static inline void *inferd_map(size_t size) {
        void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return address == MAP_FAILED ? NULL : address;
    }
    static inline void *inferd_remap(void *address, size_t size, size_t grown) {
        address = mremap(address, size, grown, MREMAP_MAYMOVE);
        return address == MAP_FAILED ? NULL : address;
    }
    """
    void *map_memory "inferd_map"(size_t size) nogil
    void *remap_memory "inferd_remap"(void *address, size_t size, size_t grown) nogil
    int munmap(void *address, size_t size) nogil

cdef enum:
    ALIGNMENT = 64
    PREFIX = 5               # bytes of gRPC in front of a message
    MAPPED_FROM = 1 << 20
    SLICE = 256 << 10        # bytes that are inflated at a time, in about a millisecond
    DEFLATED = 64 << 10      # bytes that are compressed at a time, which takes longer than inflating
    FIRST_GUESS = 4          # assumed ratio of inflated to compressed size
    SMALLEST = 1024
    MAX_RATIO = 1032         # of deflate: a match of 258 bytes in two bits
    GZIP_FRAME = 18          # bytes of an empty gzip header and of the trailer
    GZIP_BITS = 16           # added to the window bits: gzip instead of zlib format
    MAX_WINDOW_BITS = 15
    PROBE_FROM = 64 << 10    # of larger messages a sample is compressed first
    SAMPLE = 8 << 10


# ---------------------------------------------------------------------------------------------------------------------
# Names

cdef Encoding encoding_parse(const uint8_t *name, size_t size) noexcept nogil:
    if size == 8 and memcmp(name, "identity", 8) == 0:
        return ENCODING_IDENTITY
    if size == 7 and memcmp(name, "deflate", 7) == 0:
        return ENCODING_DEFLATE
    if size == 4 and memcmp(name, "gzip", 4) == 0:
        return ENCODING_GZIP
    return ENCODING_UNKNOWN


cdef uint8_t encodings_parse(const uint8_t *names, size_t size) noexcept nogil:
    cdef uint8_t found = 0
    cdef size_t begin = 0
    cdef size_t end
    while begin < size:
        while begin < size and (names[begin] == c" " or names[begin] == c","):
            begin += 1
        end = begin
        while end < size and names[end] != c" " and names[end] != c",":
            end += 1
        found |= 1 << <int>encoding_parse(names + begin, end - begin)
        begin = end
    return found


cdef const char *encoding_name(Encoding encoding) noexcept nogil:
    if encoding == ENCODING_GZIP:
        return "gzip"
    return "deflate" if encoding == ENCODING_DEFLATE else "identity"


# ---------------------------------------------------------------------------------------------------------------------
# Room that grows

cdef void unmap(void *mapping) noexcept nogil:
    munmap(mapping, (<Mapping *>mapping).size)


cdef bint room_map(Room *room, size_t capacity) noexcept nogil:
    cdef size_t size = ALIGNMENT + capacity + room.behind
    cdef void *address
    if room.mapping == NULL:
        address = map_memory(size)
    else:
        address = remap_memory(room.mapping, room.mapping.size, size)
    if address == NULL:
        return False
    room.mapping = <Mapping *>address
    room.mapping.size = size
    room.data = <uint8_t *>address + ALIGNMENT
    room.capacity = capacity
    return True


cdef bint room_set(Room *room, size_t capacity) noexcept nogil:
    # set the capacity; the contents stay
    cdef Block *old = room.block
    cdef const uint8_t *data = room.data
    if capacity >= MAPPED_FROM:
        if not room_map(room, capacity):
            return False
        room.block = NULL
    else:
        room.block = block_take(capacity + room.behind)
        if room.block == NULL:
            room.block = old
            return False
        room.data = room.block.data
        room.capacity = capacity
    if old != NULL:
        memcpy(room.data, data, room.used)
        block_give(old)
    return True


cdef bint room_open(Room *room, size_t capacity, size_t limit, size_t behind) noexcept nogil:
    memset(room, 0, sizeof(Room))
    room.limit = limit
    room.behind = behind
    return room_set(room, min(capacity, limit))


cdef Result room_grow(Room *room) noexcept nogil:
    if room.capacity == room.limit:
        return RESULT_TOO_LARGE
    return RESULT_OK if room_set(room, min(2 * room.capacity, room.limit)) else RESULT_NO_MEMORY


cdef void room_drop(Room *room) noexcept nogil:
    block_give(room.block)
    if room.mapping != NULL:
        unmap(room.mapping)


cdef Block *room_take(Room *room) noexcept nogil:
    # the block with the contents; NULL: there is no memory, and the room is dropped
    cdef Block *block = room.block
    if block == NULL:
        block = block_wrap(room.data, room.capacity, unmap, room.mapping)
        if block == NULL:
            room_drop(room)
    return block


# ---------------------------------------------------------------------------------------------------------------------
# Inflating

cdef inline size_t gzip_declared(const uint8_t *data, size_t size) noexcept nogil:
    data += size - 4
    return (<size_t>data[0] | <size_t>data[1] << 8 | <size_t>data[2] << 16 | <size_t>data[3] << 24)


cdef Result inflater_begin(Inflater *self, Encoding encoding, const uint8_t *data, size_t size,
                           size_t limit, size_t behind) noexcept nogil:
    cdef size_t declared
    self.encoding = encoding
    self.stream.next_in = <uint8_t *>data
    self.stream.avail_in = <unsigned int>size
    if encoding == ENCODING_GZIP:
        if size < GZIP_FRAME:
            return RESULT_TRUNCATED
        declared = gzip_declared(data, size)
        if declared // MAX_RATIO > size:
            return RESULT_CORRUPT
        if declared > limit:
            return RESULT_TOO_LARGE
        self.ahead = -declared & (ALIGNMENT - 1)
        if not room_open(&self.room, self.ahead + declared, self.ahead + declared, behind):
            return RESULT_NO_MEMORY
        self.room.used = self.ahead
    elif not room_open(&self.room, max(<size_t>SMALLEST, FIRST_GUESS * size), limit, behind):
        return RESULT_NO_MEMORY
    if inflateInit2(&self.stream, MAX_WINDOW_BITS + (GZIP_BITS if encoding == ENCODING_GZIP else 0)) != Z_OK:
        return RESULT_NO_MEMORY
    self.begun = True
    return RESULT_MORE


cdef Result run_inflate(Inflater *self, size_t *worked) noexcept nogil:
    cdef Room *room = &self.room
    cdef size_t offered = min(<size_t>SLICE, room.capacity - room.used)
    cdef int code
    self.stream.next_out = room.data + room.used
    self.stream.avail_out = <unsigned int>offered
    code = inflate(&self.stream, Z_NO_FLUSH)
    worked[0] = offered - self.stream.avail_out
    room.used += worked[0]
    if code == Z_STREAM_END:
        return RESULT_OK if self.stream.avail_in == 0 else RESULT_CORRUPT
    if code == Z_MEM_ERROR:
        return RESULT_NO_MEMORY
    if code != Z_OK and code != Z_BUF_ERROR:
        return RESULT_CORRUPT
    if self.stream.avail_out:
        return RESULT_TRUNCATED  # there was room and no more came: the input is used up
    # A full room may hold the whole message: only a call without any room shows whether just the trailer is left.
    if offered == 0:
        code = room_grow(room)
        if code != RESULT_OK:
            return <Result>code
    return RESULT_MORE


cdef Result inflater_slice(Inflater *self, size_t *worked, Inflated *out) noexcept nogil:
    cdef Result result = run_inflate(self, worked)
    if result == RESULT_TOO_LARGE and self.encoding == ENCODING_GZIP:
        return RESULT_CORRUPT  # the message is larger than its trailer says, so the trailer is false
    if result != RESULT_OK:
        return result
    out.data = self.room.data + self.ahead
    out.size = self.room.used - self.ahead
    out.block = room_take(&self.room)
    memset(&self.room, 0, sizeof(Room))
    return RESULT_OK if out.block != NULL else RESULT_NO_MEMORY


cdef void inflater_end(Inflater *self) noexcept nogil:
    if self.begun:
        inflateEnd(&self.stream)
    room_drop(&self.room)


cdef Result inflate_message(Encoding encoding, const uint8_t *data, size_t size, size_t limit, size_t behind,
                            Inflated *out) noexcept nogil:
    cdef Inflater inflater
    cdef Result result
    cdef size_t worked = 0
    memset(&inflater, 0, sizeof(Inflater))
    result = inflater_begin(&inflater, encoding, data, size, limit, behind)
    while result == RESULT_MORE:
        result = inflater_slice(&inflater, &worked, out)
    inflater_end(&inflater)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Deflating

cdef bint deflate_open(z_stream *stream, Encoding encoding, int level, size_t size) noexcept nogil:
    # window and tables follow the size: those of a large message would cost a small one more than its bytes
    cdef int bits = 9
    while bits < MAX_WINDOW_BITS and <size_t>1 << bits < size:
        bits += 1
    memset(stream, 0, sizeof(z_stream))
    return deflateInit2(stream, level, Z_DEFLATED, bits + (GZIP_BITS if encoding == ENCODING_GZIP else 0), bits - 7,
                        Z_DEFAULT_STRATEGY) == Z_OK


cdef bint run_deflate(z_stream *stream, int flush, Room *room) noexcept nogil:
    # compress all of the input; False: there is no more room
    cdef size_t offered
    cdef int code
    while True:
        if room.used == room.capacity and room_grow(room) != RESULT_OK:
            return False
        offered = min(<size_t>SLICE, room.capacity - room.used)
        stream.next_out = room.data + room.used
        stream.avail_out = <unsigned int>offered
        code = deflate(stream, flush)
        room.used += offered - stream.avail_out
        if code == Z_STREAM_END or (flush == Z_NO_FLUSH and stream.avail_in == 0 and stream.avail_out):
            return True
        if code != Z_OK and code != Z_BUF_ERROR:
            return False


cdef inline size_t worthwhile(size_t size) noexcept nogil:
    return size - size // 16


cdef bint sample_shrinks(const Outgoing *message) noexcept nogil:
    # judge the message by the middle of its largest segment
    cdef const Segment *largest = message.segments
    cdef z_stream stream
    cdef Room room
    cdef size_t size
    cdef bint fits = False
    cdef uint32_t i
    for i in range(message.count):
        if message.segments[i].size > largest.size:
            largest = &message.segments[i]
    size = min(<size_t>SAMPLE, largest.size)
    if not room_open(&room, worthwhile(size), worthwhile(size), 0):
        return False
    if deflate_open(&stream, ENCODING_DEFLATE, 1, size):
        stream.next_in = <uint8_t *>largest.data + (largest.size - size) // 2
        stream.avail_in = <unsigned int>size
        fits = run_deflate(&stream, Z_FINISH, &room)
        deflateEnd(&stream)
    room_drop(&room)
    return fits


cdef bint deflater_begin(Deflater *self, Encoding encoding, int level, const Outgoing *message) noexcept nogil:
    cdef size_t size = message.left - PREFIX
    if size == 0 or (size >= PROBE_FROM and not sample_shrinks(message)):
        return False
    self.message = message
    self.at = PREFIX
    if not room_open(&self.room, max(<size_t>SMALLEST, size // FIRST_GUESS), worthwhile(size), 0):
        return False
    self.begun = deflate_open(&self.stream, encoding, level, size)
    return self.begun


cdef bint deflate_slice(Deflater *self, size_t *worked) noexcept nogil:
    # False: it does not pay
    cdef const Segment *segment
    cdef size_t part
    while self.segment < self.message.count and worked[0] < DEFLATED:
        segment = &self.message.segments[self.segment]
        part = min(<size_t>DEFLATED - worked[0], segment.size - self.at)
        self.stream.next_in = <uint8_t *>segment.data + self.at
        self.stream.avail_in = <unsigned int>part
        if not run_deflate(&self.stream, Z_NO_FLUSH, &self.room):
            return False
        self.at += part
        worked[0] += part
        if self.at == segment.size:
            self.segment += 1
            self.at = 0
    return self.segment < self.message.count or run_deflate(&self.stream, Z_FINISH, &self.room)


cdef Result deflater_slice(Deflater *self, size_t *worked, Outgoing **out) noexcept nogil:
    cdef size_t size
    cdef Block *block
    worked[0] = 0
    if not deflate_slice(self, worked):
        return RESULT_TOO_LARGE
    if self.segment < self.message.count:
        return RESULT_MORE
    size = self.room.used
    block = room_take(&self.room)
    out[0] = outgoing_new(2, PREFIX) if block != NULL else NULL
    if out[0] != NULL:
        write_message_prefix(out[0].room, size)
        out[0].room[0] = 1  # compressed
        outgoing_add(out[0], out[0].home, out[0].room, PREFIX)
        outgoing_add(out[0], block, self.room.data, size)
    block_give(block)
    memset(&self.room, 0, sizeof(Room))
    return RESULT_OK if out[0] != NULL else RESULT_NO_MEMORY


cdef void deflater_end(Deflater *self) noexcept nogil:
    if self.begun:
        deflateEnd(&self.stream)
    room_drop(&self.room)


cdef Outgoing *deflate_message(Encoding encoding, int level, const Outgoing *message) noexcept nogil:
    cdef Deflater deflater
    cdef Outgoing *out = NULL
    cdef size_t worked = 0
    memset(&deflater, 0, sizeof(Deflater))
    if deflater_begin(&deflater, encoding, level, message):
        while deflater_slice(&deflater, &worked, &out) == RESULT_MORE:
            pass
    deflater_end(&deflater)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# For tests.

GZIP = <int>ENCODING_GZIP
DEFLATE = <int>ENCODING_DEFLATE

RESULTS = {
    <int>RESULT_CORRUPT: "corrupt",
    <int>RESULT_TRUNCATED: "truncated",
    <int>RESULT_TOO_LARGE: "too large",
    <int>RESULT_NO_MEMORY: "no memory",
}


def _inflate(encoding: int, data: bytes, limit: int = 0xffffffff) -> bytes:
    """The inflated message.

    Raises:
        ValueError: one of RESULTS.
    """
    cdef Inflated out
    cdef Result result
    cdef const uint8_t *start = data
    cdef size_t size = len(data)
    cdef size_t most = limit
    cdef Encoding how = <Encoding><int>encoding
    with nogil:
        result = inflate_message(how, start, size, most, 0, &out)
    if result != RESULT_OK:
        raise ValueError(RESULTS[<int>result])
    try:
        return (<const char *>out.data)[:out.size]
    finally:
        block_give(out.block)


def _deflate(encoding: int, pieces: list, level: int = 6) -> bytes | None:
    """The compressed message that consists of these pieces, None when it does not pay."""
    cdef Outgoing *message
    cdef Outgoing *out
    cdef bytes piece
    cdef size_t size = sum(map(len, pieces))
    cdef uint8_t *at
    message = outgoing_new(len(pieces) + 1, PREFIX + size)
    if message == NULL:
        raise MemoryError
    write_message_prefix(message.room, size)
    outgoing_add(message, message.home, message.room, PREFIX)
    at = message.room + PREFIX
    for piece in pieces:
        memcpy(at, <const char *>piece, len(piece))
        outgoing_add(message, message.home, at, len(piece))
        at += len(piece)
    out = deflate_message(<Encoding><int>encoding, level, message)
    outgoing_free(message)
    if out == NULL:
        return None
    try:
        return (<const char *>out.segments[1].data)[:out.segments[1].size]
    finally:
        outgoing_free(out)
