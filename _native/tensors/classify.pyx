"""The classification extension; the contract is in classify.pxd."""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.memory.resource cimport Block, block_give, block_take
from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.datatype cimport DT_FP32, DT_FP64, DT_INT8, DT_INT16, DT_INT32, DT_INT64
from inferd._native.protobuf.datatype cimport DT_UINT8, DT_UINT64, Datatype, datatype_parse, datatype_size

cdef extern from *:
    """
    #include <locale.h>
    #define INFERD_SIGN_BIT 0x8000000000000000ULL

    static locale_t inferd_plain;       /* numbers with a decimal point, whatever locale a model sets */
    static int inferd_plain_init(void) {
        inferd_plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
        return inferd_plain ? 0 : -1;
    }
    """
    const uint64_t SIGN_BIT "INFERD_SIGN_BIT"
    ctypedef void *locale_t
    locale_t plain "inferd_plain"
    int plain_init "inferd_plain_init"() noexcept nogil
    locale_t uselocale(locale_t locale) noexcept nogil      # of this thread; returns the one before

cdef enum:
    VALUE_ROOM = 352        # the longest value: -DBL_MAX with 309 digits, a point and six decimals


if plain_init():
    raise MemoryError


cdef struct Row:
    const uint8_t *data
    Datatype datatype
    uint32_t width          # bytes of one element


cdef inline bint is_classifiable(Datatype datatype) noexcept nogil:
    return DT_UINT8 <= datatype <= DT_INT64 or datatype == DT_FP32 or datatype == DT_FP64


cdef inline bint is_float(Datatype datatype) noexcept nogil:
    return datatype == DT_FP32 or datatype == DT_FP64


cdef inline double real_at(const Row *row, size_t index) noexcept nogil:
    """Element `index` of a row of FP32 or FP64."""
    cdef float single
    cdef double real
    if row.datatype == DT_FP32:
        memcpy(&single, row.data + index * 4, 4)
        return single
    memcpy(&real, row.data + index * 8, 8)
    return real


cdef inline int64_t integer_at(const Row *row, size_t index) noexcept nogil:
    """Element `index` of a row of integers, sign-extended; UINT64 as the same bits."""
    cdef uint64_t bits = 0
    memcpy(&bits, row.data + index * row.width, row.width)
    if row.datatype == DT_INT8:
        return <int8_t>bits
    if row.datatype == DT_INT16:
        return <int16_t>bits
    if row.datatype == DT_INT32:
        return <int32_t>bits
    return <int64_t>bits


cdef inline uint64_t real_rank(double value) noexcept nogil:
    """An integer that orders as the numbers do, with -0 equal to 0, and with every NaN at the bottom."""
    cdef uint64_t bits
    if value != value:
        return 0
    value += 0.0            # makes 0 of -0
    memcpy(&bits, &value, 8)
    return ~bits if bits & SIGN_BIT else bits | SIGN_BIT


cdef inline uint64_t rank_at(const Row *row, size_t index) noexcept nogil:
    """An integer that orders the elements of a row as their values do."""
    if is_float(row.datatype):
        return real_rank(real_at(row, index))
    if DT_UINT8 <= row.datatype <= DT_UINT64:
        return <uint64_t>integer_at(row, index)
    return <uint64_t>integer_at(row, index) ^ SIGN_BIT


# ---------------------------------------------------------------------------------------------------------------------
# Selection: a heap of the k best seen so far, the worst of them on top

cdef struct Candidate:
    uint64_t rank
    uint32_t index


cdef inline bint is_worse(Candidate a, Candidate b) noexcept nogil:
    return a.rank < b.rank or (a.rank == b.rank and a.index > b.index)


cdef void sift_down(Candidate *heap, uint32_t size, uint32_t at) noexcept nogil:
    """Restore the heap when only the element `at` may be better than those below it."""
    cdef Candidate moved = heap[at]
    cdef uint32_t child = 2 * at + 1
    while child < size:
        if child + 1 < size and is_worse(heap[child + 1], heap[child]):
            child += 1
        if not is_worse(heap[child], moved):
            break
        heap[at] = heap[child]
        at = child
        child = 2 * at + 1
    heap[at] = moved


cdef void select_top(const Row *row, size_t elements, Candidate *top, uint32_t k) noexcept nogil:
    """Fill `top` with the k best elements of the row, best first. k is at least 1 and at most `elements`."""
    cdef Candidate candidate
    cdef uint32_t i
    for i in range(k):
        top[i].rank = rank_at(row, i)
        top[i].index = i
    i = k // 2
    while i > 0:
        i -= 1
        sift_down(top, k, i)
    for i in range(k, <uint32_t>elements):
        candidate.rank = rank_at(row, i)
        candidate.index = i
        if is_worse(top[0], candidate):
            top[0] = candidate
            sift_down(top, k, 0)
    i = k
    while i > 1:            # heap sort: the worst goes to the end
        i -= 1
        candidate = top[0]
        top[0] = top[i]
        top[i] = candidate
        sift_down(top, i, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Text

cdef int format_class(const Row *row, uint32_t index, char *text) noexcept nogil:
    """Write "value:index" into VALUE_ROOM bytes; its length."""
    cdef double real
    if is_float(row.datatype):
        real = real_at(row, index)
        if real != real:    # printf shows the sign of a NaN, which means nothing
            return snprintf(text, VALUE_ROOM, "nan:%u", index)
        return snprintf(text, VALUE_ROOM, "%f:%u", real, index)
    if row.datatype == DT_UINT64:
        return snprintf(text, VALUE_ROOM, "%llu:%u", <unsigned long long>integer_at(row, index), index)
    return snprintf(text, VALUE_ROOM, "%lld:%u", <long long>integer_at(row, index), index)


cdef inline uint32_t label_room(const Str *labels, size_t label_count, uint32_t index) noexcept nogil:
    """Bytes that the label takes with its colon."""
    if labels == NULL or index >= label_count or labels[index].size == 0:
        return 0
    return labels[index].size + 1


cdef uint8_t *write_class(const Row *row, uint32_t index, const Str *labels, size_t label_count,
                          uint8_t *out) noexcept nogil:
    """Write one BYTES element; the end of what was written."""
    cdef char[VALUE_ROOM] text
    cdef uint32_t text_size = format_class(row, index, text)
    cdef uint32_t label = label_room(labels, label_count, index)
    cdef uint32_t size = text_size + label
    memcpy(out, &size, 4)
    out += 4
    memcpy(out, text, text_size)
    out += text_size
    if label:
        out[0] = c":"
        memcpy(out + 1, labels[index].data, label - 1)
    return out + label


cdef size_t class_size(const Row *row, uint32_t index, const Str *labels, size_t label_count) noexcept nogil:
    cdef char[VALUE_ROOM] text
    return 4 + format_class(row, index, text) + label_room(labels, label_count, index)


cdef ClassifyResult write_all(Row *row, size_t rows, size_t elements, const Candidate *top, uint32_t k,
                              const Str *labels, size_t label_count, Block **out, size_t *out_size) noexcept nogil:
    """Write the k best elements of all rows."""
    cdef size_t size = 0
    cdef size_t r
    cdef uint32_t i
    cdef const uint8_t *data = row.data
    for r in range(rows):
        row.data = data + r * elements * row.width
        for i in range(k):
            size += class_size(row, top[r * k + i].index, labels, label_count)
    cdef Block *block = block_take(size)
    if block == NULL:
        return CLASSIFY_NO_MEMORY
    cdef uint8_t *p = block.data
    for r in range(rows):
        row.data = data + r * elements * row.width
        for i in range(k):
            p = write_class(row, top[r * k + i].index, labels, label_count, p)
    out[0] = block
    out_size[0] = size
    return CLASSIFY_OK


cdef ClassifyResult classify(const uint8_t *data, Datatype datatype, size_t rows, size_t elements, uint32_t k,
                             const Str *labels, size_t label_count, Block **out, size_t *out_size) noexcept nogil:
    if not is_classifiable(datatype):
        return CLASSIFY_UNSUPPORTED
    if elements > CLASSIFY_LIMIT:
        return CLASSIFY_TOO_LARGE
    if k > elements:
        k = <uint32_t>elements
    if k == 0:
        rows = 0
    cdef Row row = Row(data, datatype, datatype_size(datatype))
    # The best of every row, for measuring and for writing. They are no more than the elements of `data`.
    cdef Candidate *top = <Candidate *>malloc((rows * k + 1) * sizeof(Candidate))
    if top == NULL:
        return CLASSIFY_NO_MEMORY
    cdef size_t r
    for r in range(rows):
        row.data = data + r * elements * row.width
        select_top(&row, elements, top + r * k, k)
    row.data = data
    cdef locale_t before = uselocale(plain)
    cdef ClassifyResult result = write_all(&row, rows, elements, top, k, labels, label_count, out, out_size)
    uselocale(before)
    free(top)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# For tests and tools

def classify_tensor(bytes data not None, str datatype not None, size_t rows, size_t elements, uint32_t k,
                    labels=()):
    """The BYTES tensor content for `rows` rows of `elements` elements each.

    Raises TypeError for a datatype without classes, OverflowError for rows that are too long, and ValueError when
    `data` has another size than rows × elements.
    """
    cdef bytes type_name = datatype.encode()
    cdef Datatype kind = <Datatype>datatype_parse(type_name, len(type_name))
    cdef list texts = [label.encode() for label in labels]
    cdef Block *block = NULL
    cdef size_t size = 0
    if <size_t>len(data) != rows * elements * datatype_size(kind):
        raise ValueError(f"{len(data)} bytes for {rows} x {elements} {datatype}")
    cdef Str *runs = <Str *>malloc((len(texts) + 1) * sizeof(Str))
    if runs == NULL:
        raise MemoryError
    cdef size_t count = len(texts)
    cdef size_t i
    cdef const uint8_t *p = data
    cdef ClassifyResult result
    for i in range(count):
        runs[i] = Str(<bytes>texts[i], <uint32_t>len(texts[i]))
    with nogil:
        result = classify(p, kind, rows, elements, k, runs, count, &block, &size)
        free(runs)
    if result == CLASSIFY_UNSUPPORTED:
        raise TypeError(f"{datatype} has no classes")
    if result == CLASSIFY_TOO_LARGE:
        raise OverflowError(f"more than {CLASSIFY_LIMIT} elements in a row")
    if result == CLASSIFY_NO_MEMORY:
        raise MemoryError
    content = (<char *>block.data)[:size]
    block_give(block)
    return content
