"""The ledger of loans: which memory of the arena one worker may use, and until when.

The server finds memory that a worker names only through this ledger, and reuses it only after the loan has ended.
Loans of single blocks are in one list ordered by their place in the arena, since a worker names memory by its place;
executions are known by their number.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memmove

from inferd._native.atomic cimport store32
from inferd._native.memory.resource cimport Block, block_give


# ---------------------------------------------------------------------------------------------------------------------
# Single blocks

cdef uint32_t place_of(const Ledger *ledger, uint64_t offset) noexcept nogil:
    # the number of loans that begin at or before this offset
    cdef uint32_t low = 0
    cdef uint32_t high = ledger.count
    cdef uint32_t middle
    while low < high:
        middle = (low + high) // 2
        if ledger.loans[middle].offset <= offset:
            low = middle + 1
        else:
            high = middle
    return low


cdef bint loan_begin(Ledger *ledger, LoanKind kind, Block *block, uint64_t offset) noexcept nogil:
    cdef uint32_t capacity = ledger.capacity * 2 + 8
    cdef uint32_t place
    cdef Loan *grown
    if ledger.of_kind[<int>kind] >= MOST_LOANS:
        return False
    if ledger.count == ledger.capacity:
        grown = <Loan *>realloc(ledger.loans, capacity * sizeof(Loan))
        if grown == NULL:
            return False
        ledger.loans = grown
        ledger.capacity = capacity
    place = place_of(ledger, offset)
    memmove(ledger.loans + place + 1, ledger.loans + place, (ledger.count - place) * sizeof(Loan))
    ledger.loans[place].offset = offset
    ledger.loans[place].size = block.size
    ledger.loans[place].block = block
    ledger.loans[place].kind = kind
    ledger.count += 1
    store32(<int32_t *>&ledger.of_kind[<int>kind], <int32_t>ledger.of_kind[<int>kind] + 1)
    return True


cdef Loan *loan_find(const Ledger *ledger, LoanKind kind, uint64_t offset, uint64_t size) noexcept nogil:
    cdef uint32_t place = place_of(ledger, offset)
    cdef Loan *loan
    if place == 0:
        return NULL
    loan = &ledger.loans[place - 1]
    if loan.kind != kind or offset - loan.offset >= loan.size or size > loan.size - (offset - loan.offset):
        return NULL
    return loan


cdef Block *loan_end(Ledger *ledger, Loan *loan) noexcept nogil:
    cdef Block *block = loan.block
    cdef uint32_t place = <uint32_t>(loan - ledger.loans)
    store32(<int32_t *>&ledger.of_kind[<int>loan.kind], <int32_t>ledger.of_kind[<int>loan.kind] - 1)
    ledger.count -= 1
    memmove(loan, loan + 1, (ledger.count - place) * sizeof(Loan))
    return block


cdef Block *loan_end_one(Ledger *ledger, LoanKind kind) noexcept nogil:
    cdef uint32_t place = ledger.count
    if ledger.of_kind[<int>kind] == 0:
        return NULL
    while ledger.loans[place - 1].kind != kind:
        place -= 1
    return loan_end(ledger, &ledger.loans[place - 1])


cdef Block *loan_end_last(Ledger *ledger) noexcept nogil:
    if ledger.count == 0:
        return NULL
    return loan_end(ledger, &ledger.loans[ledger.count - 1])


# ---------------------------------------------------------------------------------------------------------------------
# Executions

cdef uint64_t execution_begin(Ledger *ledger) noexcept nogil:
    ledger.executions += 1
    ledger.executing = True
    ledger.released = False
    return ledger.executions


cdef Kept *execution_end(Ledger *ledger, Kept *kept, const char **rule) noexcept nogil:
    cdef Kept **bucket = &ledger.kept[ledger.executions % KEPT_BUCKETS]
    ledger.executing = False
    if ledger.released:
        if kept == NULL:
            rule[0] = "released the memory of a batch that it had not kept"
        return kept
    if kept == NULL:
        return NULL
    if ledger.kept_count == MOST_KEPT:
        rule[0] = "keeps the memory of too many batches"
        return kept
    kept.id = ledger.executions
    kept.next = bucket[0]
    bucket[0] = kept
    ledger.kept_count += 1
    return NULL


cdef Kept *execution_release(Ledger *ledger, uint64_t id, const char **rule) noexcept nogil:
    cdef Kept **link = &ledger.kept[id % KEPT_BUCKETS]
    cdef Kept *kept
    if ledger.executing and id == ledger.executions and not ledger.released:
        ledger.released = True  # the server has read it before DONE: they come on different sockets
        return NULL
    while link[0] != NULL and link[0].id != id:
        link = &link[0].next
    kept = link[0]
    if kept == NULL:
        rule[0] = "released memory that it does not have"
        return NULL
    link[0] = kept.next
    ledger.kept_count -= 1
    return kept


cdef Kept *execution_forget(Ledger *ledger) noexcept nogil:
    cdef Kept *kept
    cdef int bucket
    if ledger.kept_count == 0:
        return NULL
    for bucket in range(KEPT_BUCKETS):
        kept = ledger.kept[bucket]
        if kept != NULL:
            ledger.kept[bucket] = kept.next
            ledger.kept_count -= 1
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


cdef void ledger_free(Ledger *ledger) noexcept nogil:
    free(ledger.loans)
