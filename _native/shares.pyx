"""Shares: which client makes room in a full queue, and whose turn is next."""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from inferd._native.assertion cimport assert_that
from inferd._native.list cimport list_append, list_prepend, list_remove

cdef enum:
    FIRST_CAPACITY = 64
    STEPS = 256              # steps of a search that each request pays for
    IDLE = 1024              # idle shares that may be kept, because of what they have had

cdef uint64_t SPREAD = 0x9E3779B97F4A7C15


# ---------------------------------------------------------------------------------------------------------------------
# The table

cdef inline Share **bucket_of(const Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    return &self.buckets[<uint32_t>(((client ^ (<uint64_t>level << 56)) * SPREAD) >> 32) & (self.capacity - 1)]


cdef inline Share *find(const Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    cdef Share *share = bucket_of(self, client, level)[0]
    while share != NULL and (share.client != client or share.level != level):
        share = share.following
    return share


cdef bint shares_begin(Shares *self) noexcept nogil:
    self.buckets = <Share **>calloc(FIRST_CAPACITY, sizeof(Share *))
    self.order = <Share **>calloc(FIRST_CAPACITY, sizeof(Share *))
    self.capacity = FIRST_CAPACITY
    self.used = self.bound = self.ordered = 0
    self.credit = self.now = 0
    if self.buckets == NULL or self.order == NULL:
        shares_end(self)
        return False
    return True


cdef void shares_end(Shares *self) noexcept nogil:
    cdef Share *share
    cdef Share *following
    cdef uint32_t i
    if self.buckets != NULL:
        for i in range(self.capacity):
            share = self.buckets[i]
            while share != NULL:
                following = share.following
                free(share)
                share = following
    free(self.buckets)
    free(self.order)
    self.buckets = NULL
    self.order = NULL
    self.capacity = self.used = self.ordered = 0


cdef bint grow(Shares *self) noexcept nogil:
    # twice the buckets, and as many places in the order; False: no memory
    cdef Shares larger = self[0]
    cdef Share *share
    cdef Share *following
    cdef Share **bucket
    cdef uint32_t i
    larger.capacity = 2 * self.capacity
    larger.buckets = <Share **>calloc(larger.capacity, sizeof(Share *))
    larger.order = <Share **>calloc(larger.capacity, sizeof(Share *))
    if larger.buckets == NULL or larger.order == NULL:
        free(larger.buckets)
        free(larger.order)
        return False
    for i in range(self.capacity):
        share = self.buckets[i]
        while share != NULL:
            following = share.following
            bucket = bucket_of(&larger, share.client, share.level)
            share.following = bucket[0]
            bucket[0] = share
            share = following
    for i in range(self.ordered):
        larger.order[i] = self.order[i]
    free(self.buckets)
    free(self.order)
    self[0] = larger
    return True


cdef Share *find_or_make(Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    # NULL: no memory
    cdef Share *share = find(self, client, level)
    cdef Share **bucket
    if share != NULL:
        return share
    if self.used == self.capacity and not forget_idle(self) and not grow(self):
        return NULL
    share = <Share *>calloc(1, sizeof(Share))
    if share == NULL:
        return NULL
    share.client = client
    share.level = level
    share.place = UNORDERED
    bucket = bucket_of(self, client, level)
    share.following = bucket[0]
    bucket[0] = share
    self.used += 1
    return share


cdef void forget(Shares *self, Share *share) noexcept nogil:
    cdef Share **link = bucket_of(self, share.client, share.level)
    while link[0] != share:
        link = &link[0].following
    link[0] = share.following
    self.used -= 1
    free(share)


cdef inline bint is_idle(const Share *share) noexcept nogil:
    return share.count == 0 and share.served == 0


# ---------------------------------------------------------------------------------------------------------------------
# Making room

cdef bint shares_add(Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    cdef Share *share = find_or_make(self, client, level)
    if share == NULL:
        shares_end(self)
        return False
    share.count += 1
    self.bound = max(self.bound, share.count)
    return True


cdef void shares_subtract(Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    cdef Share *share = find(self, client, level)
    if share == NULL:
        return
    assert_that(share.count > 0)
    share.count -= 1
    if share.count == 0:
        forget(self, share)


cdef bint is_worth_searching(Shares *self, uint32_t own, uint32_t waiting) noexcept nogil:
    # A search visits every share and, for the requests that it removes, the queue. Each new request pays for some steps
    # of it, and so does each that may be removed: where many clients have little, not every request makes room.
    self.credit += STEPS
    if self.credit + <uint64_t>((self.bound - own) // 2) * STEPS < <uint64_t>self.capacity + waiting:
        return False
    self.credit = 0
    return True


cdef inline bint yields_before(const Share *share, const Share *other) noexcept nogil:
    # The larger share; of equal ones the least important, then that of the client that came first. The order of the
    # buckets must not decide.
    if share.count != other.count:
        return share.count > other.count
    return share.level > other.level or (share.level == other.level and share.client < other.client)


cdef const Share *shares_yielding(Shares *self, uint64_t client, uint32_t first, uint32_t last, uint32_t waiting,
                                  uint32_t *most) noexcept nogil:
    cdef const Share *share = find(self, client, first)
    cdef uint32_t own = share.count if share != NULL else 0
    cdef const Share *found = NULL
    cdef uint32_t largest = 0
    cdef uint32_t i
    if self.bound <= own + 1 or not is_worth_searching(self, own, waiting):
        return NULL
    for i in range(self.capacity):
        share = self.buckets[i]
        while share != NULL:
            largest = max(largest, share.count)
            if share.count > own + 1 and first <= share.level <= last:
                if found == NULL or yields_before(share, found):
                    found = share
            share = share.following
    self.bound = largest
    if found != NULL:
        most[0] = (found.count - own) // 2
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The order of turns: a heap, the earliest on top

cdef inline void place_at(Shares *self, uint32_t place, Share *share) noexcept nogil:
    self.order[place] = share
    share.place = place


cdef inline bint is_before(const Share *a, const Share *b) noexcept nogil:
    # at the same time, shares whose items wait come before idle ones
    return a.start < b.start or (a.start == b.start and a.count != 0 and b.count == 0)


cdef void rise(Shares *self, Share *share) noexcept nogil:
    cdef uint32_t place = share.place
    while place and is_before(share, self.order[(place - 1) // 2]):
        place_at(self, place, self.order[(place - 1) // 2])
        place = (place - 1) // 2
    place_at(self, place, share)


cdef void sink(Shares *self, Share *share) noexcept nogil:
    cdef uint32_t place = share.place
    cdef uint32_t below = 2 * place + 1
    while below < self.ordered:
        if below + 1 < self.ordered and is_before(self.order[below + 1], self.order[below]):
            below += 1
        if not is_before(self.order[below], share):
            break
        place_at(self, place, self.order[below])
        place = below
        below = 2 * place + 1
    place_at(self, place, share)


cdef void enter(Shares *self, Share *share) noexcept nogil:
    share.place = self.ordered
    self.ordered += 1
    rise(self, share)


cdef void withdraw(Shares *self, Share *share) noexcept nogil:
    cdef uint32_t place = share.place
    cdef Share *last
    self.ordered -= 1
    last = self.order[self.ordered]
    share.place = UNORDERED
    if last != share:
        place_at(self, place, last)
        rise(self, last)
        sink(self, last)


cdef void settle(Shares *self, Share *share) noexcept nogil:
    # The share has changed. It is in the order while its items wait, or while it has had more than its part; else it is
    # forgotten when it is idle.
    cdef bint wanted = share.count != 0 or (share.served == 0 and share.start > self.now)
    if wanted and share.place == UNORDERED:
        enter(self, share)
    elif wanted:
        rise(self, share)
        sink(self, share)
    elif share.place != UNORDERED:
        withdraw(self, share)
    if not wanted and is_idle(share):
        forget(self, share)


cdef bint forget_idle(Shares *self) noexcept nogil:
    # Forget the idle shares: there is one for each client that was served lately, and an attacker may have any number
    # of addresses. False: there are few.
    cdef uint32_t idle = 0
    cdef uint32_t i
    cdef Share *share
    for i in range(self.ordered):
        idle += is_idle(self.order[i])
    if idle < IDLE or idle < self.used // 2:
        return False
    i = self.ordered
    while i:
        i -= 1
        if i >= self.ordered:
            continue
        share = self.order[i]
        if is_idle(share):
            withdraw(self, share)
            forget(self, share)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Turns

cdef bint shares_put(Shares *self, Waiting *item, uint64_t client) noexcept nogil:
    cdef Share *share = find_or_make(self, client, 0)
    if share == NULL:
        return False
    if share.count == 0:
        share.start = max(share.start, self.now)
    item.share = share
    list_append(&share.items, item)
    share.count += 1
    settle(self, share)
    return True


cdef Waiting *shares_take(Shares *self) noexcept nogil:
    cdef Share *share
    cdef Waiting *item
    while self.ordered and self.order[0].count == 0:
        share = self.order[0]  # it is idle, and no share whose items wait begins earlier
        withdraw(self, share)
        forget(self, share)
    if self.ordered == 0:
        return NULL
    share = self.order[0]
    item = share.items.first
    list_remove(&share.items, item)
    share.count -= 1
    share.served += 1
    self.now = max(self.now, share.start)
    settle(self, share)
    return item


cdef void shares_put_back(Shares *self, Waiting *item) noexcept nogil:
    cdef Share *share = item.share
    list_prepend(&share.items, item)
    share.count += 1
    share.served -= 1
    settle(self, share)


cdef void shares_leave(Shares *self, Waiting *item) noexcept nogil:
    cdef Share *share = item.share
    if item.previous != NULL or item.next != NULL or share.items.first == item:
        list_remove(&share.items, item)
        share.count -= 1
    else:
        share.served -= 1
    item.share = NULL
    settle(self, share)


cdef void shares_charge(Shares *self, Waiting *item, uint64_t cost) noexcept nogil:
    item.share.start += cost
    settle(self, item.share)


# ---------------------------------------------------------------------------------------------------------------------

cdef struct Object:
    Waiting waiting
    void *object


cdef class Turns:
    """Objects of clients that wait, each until it is its client's turn. Each client gets as many turns as any other."""

    def __cinit__(self):
        if not shares_begin(&self.shares):
            raise MemoryError

    def __dealloc__(self):
        cdef Waiting *item = NULL
        while self.shares.buckets != NULL:
            item = shares_take(&self.shares)
            if item == NULL:
                break
            self.let_go(item)
        shares_end(&self.shares)

    cdef object let_go(self, Waiting *item):
        cdef object found = <object>(<Object *>item).object
        Py_DECREF(found)
        shares_charge(&self.shares, item, 1)
        shares_leave(&self.shares, item)
        free(item)
        return found

    def put(self, client: int, item: object) -> None:
        """Append the object to those of the client."""
        cdef Object *entry = <Object *>malloc(sizeof(Object))
        if entry == NULL:
            raise MemoryError
        entry.object = <void *>item
        if not shares_put(&self.shares, &entry.waiting, client):
            free(entry)
            raise MemoryError
        Py_INCREF(item)
        self.waiting += 1

    def take(self) -> object:
        """The object whose turn is next; IndexError if none waits."""
        cdef Waiting *item = shares_take(&self.shares)
        if item == NULL:
            raise IndexError("nothing waits")
        self.waiting -= 1
        return self.let_go(item)
