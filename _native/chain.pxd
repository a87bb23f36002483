# Chains: first-in, first-out lists of structures that begin with a Link. They neither allocate nor lock.

cdef struct Link:
    Link *next

cdef struct Chain:
    Link *first
    Link *last


cdef inline void chain_push(Chain *chain, void *item) noexcept nogil:
    cdef Link *link = <Link *>item
    link.next = NULL
    if chain.first == NULL:
        chain.first = link
    else:
        chain.last.next = link
    chain.last = link


cdef inline void *chain_pop(Chain *chain) noexcept nogil:
    # NULL when it is empty
    cdef Link *link = chain.first
    if link != NULL:
        chain.first = link.next
    return link


cdef inline void chain_remove(Chain *chain, void *item) noexcept nogil:
    # takes the item out of the chain if it is there; walks over all items before it
    cdef Link *before = NULL
    cdef Link *at = chain.first
    while at != NULL and at != <Link *>item:
        before = at
        at = at.next
    if at == NULL:
        return
    if before == NULL:
        chain.first = at.next
    else:
        before.next = at.next
    if chain.last == at:
        chain.last = before
