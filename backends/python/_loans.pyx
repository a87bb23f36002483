"""The loans to a worker: the memory of the arena that it may use, and until when.

The server finds memory that a worker names only through these records, and reuses it only after the loan has ended.
Loans of single blocks are in one list ordered by their place in the arena, since a worker names memory by its place;
executions are known by their number.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memmove

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport store32
from inferd._native.memory.resource cimport Block, block_give


# ---------------------------------------------------------------------------------------------------------------------
# Single blocks

cdef uint32_t place_of(const Loans *loans, uint64_t offset) noexcept nogil:
    # the number of loans that begin at or before this offset
    cdef uint32_t low = 0
    cdef uint32_t high = loans.count
    cdef uint32_t middle
    while low < high:
        middle = (low + high) // 2
        if loans.by_offset[middle].offset <= offset:
            low = middle + 1
        else:
            high = middle
    return low


cdef bint loan_begin(Loans *loans, LoanKind kind, Block *block, uint64_t offset) noexcept nogil:
    cdef uint32_t capacity = loans.capacity * 2 + 8
    cdef uint32_t place
    cdef Loan *grown
    if loans.of_kind[<int>kind] >= MOST_LOANS:
        return False
    if loans.count == loans.capacity:
        grown = <Loan *>realloc(loans.by_offset, capacity * sizeof(Loan))
        if grown == NULL:
            return False
        loans.by_offset = grown
        loans.capacity = capacity
    place = place_of(loans, offset)
    assert_that(place == 0 or loans.by_offset[place - 1].offset + loans.by_offset[place - 1].size <= offset)
    assert_that(place == loans.count or offset + block.size <= loans.by_offset[place].offset)
    memmove(loans.by_offset + place + 1, loans.by_offset + place, (loans.count - place) * sizeof(Loan))
    loans.by_offset[place].offset = offset
    loans.by_offset[place].size = block.size
    loans.by_offset[place].block = block
    loans.by_offset[place].kind = kind
    loans.count += 1
    store32(<int32_t *>&loans.of_kind[<int>kind], <int32_t>loans.of_kind[<int>kind] + 1)
    return True


cdef Loan *loan_find(const Loans *loans, LoanKind kind, uint64_t offset, uint64_t size) noexcept nogil:
    cdef uint32_t place = place_of(loans, offset)
    cdef Loan *loan
    if place == 0:
        return NULL
    loan = &loans.by_offset[place - 1]
    if loan.kind != kind or offset - loan.offset >= loan.size or size > loan.size - (offset - loan.offset):
        return NULL
    return loan


cdef Block *loan_end(Loans *loans, Loan *loan) noexcept nogil:
    cdef Block *block = loan.block
    cdef uint32_t place = <uint32_t>(loan - loans.by_offset)
    assert_that(place < loans.count and loans.of_kind[<int>loan.kind] > 0)
    store32(<int32_t *>&loans.of_kind[<int>loan.kind], <int32_t>loans.of_kind[<int>loan.kind] - 1)
    loans.count -= 1
    memmove(loan, loan + 1, (loans.count - place) * sizeof(Loan))
    return block


cdef Block *loan_end_one(Loans *loans, LoanKind kind) noexcept nogil:
    cdef uint32_t place = loans.count
    if loans.of_kind[<int>kind] == 0:
        return NULL
    while loans.by_offset[place - 1].kind != kind:
        place -= 1
    return loan_end(loans, &loans.by_offset[place - 1])


cdef Block *loan_end_last(Loans *loans) noexcept nogil:
    if loans.count == 0:
        return NULL
    return loan_end(loans, &loans.by_offset[loans.count - 1])


# ---------------------------------------------------------------------------------------------------------------------
# Executions

cdef uint64_t execution_begin(Loans *loans) noexcept nogil:
    loans.executions += 1
    loans.executing = True
    loans.released = False
    return loans.executions


cdef Kept *execution_end(Loans *loans, Kept *kept, const char **rule) noexcept nogil:
    cdef Kept **bucket = &loans.kept[loans.executions % KEPT_BUCKETS]
    loans.executing = False
    if loans.released:
        if kept == NULL:
            rule[0] = "released the memory of a batch that it had not kept"
        return kept
    if kept == NULL:
        return NULL
    if loans.kept_count == MOST_KEPT:
        rule[0] = "keeps the memory of too many batches"
        return kept
    kept.id = loans.executions
    kept.next = bucket[0]
    bucket[0] = kept
    loans.kept_count += 1
    return NULL


cdef Kept *execution_release(Loans *loans, uint64_t id, const char **rule) noexcept nogil:
    cdef Kept **link = &loans.kept[id % KEPT_BUCKETS]
    cdef Kept *kept
    if loans.executing and id == loans.executions and not loans.released:
        loans.released = True  # the server has read it before DONE: they come on different sockets
        return NULL
    while link[0] != NULL and link[0].id != id:
        link = &link[0].next
    kept = link[0]
    if kept == NULL:
        rule[0] = "released memory that it does not have"
        return NULL
    link[0] = kept.next
    loans.kept_count -= 1
    return kept


cdef Kept *execution_forget(Loans *loans) noexcept nogil:
    cdef Kept *kept
    cdef int bucket
    if loans.kept_count == 0:
        return NULL
    for bucket in range(KEPT_BUCKETS):
        kept = loans.kept[bucket]
        if kept != NULL:
            loans.kept[bucket] = kept.next
            loans.kept_count -= 1
            return kept
    return NULL


cdef Kept *kept_new(uint32_t most) noexcept nogil:
    cdef Kept *kept = <Kept *>malloc(sizeof(Kept) + most * sizeof(Block *))
    if kept != NULL:
        kept.count = 0
    return kept


cdef void kept_give(Kept *kept) noexcept nogil:
    cdef uint32_t i
    if kept == NULL:
        return
    for i in range(kept.count):
        block_give(kept.blocks[i])
    free(kept)


cdef void loans_free(Loans *loans) noexcept nogil:
    free(loans.by_offset)
