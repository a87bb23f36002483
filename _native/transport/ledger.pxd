# The ledger: the memory that peers make the server hold. A charge moves with its message and is released once.
#
# A charge counts memory, not payload: the room for a message, and the structures around each message and each call. So
# nothing is free, not even an empty message. An announced message costs nothing. From its first byte on it has a
# charge, which moves with it through the stages below. Each response has a charge of its own until its bytes are
# written; framed output that the socket does not take is charged to its connection. A message that keeps more memory
# alive than its own bytes is charged for that memory, or copied (outgoing.pyx). A charge belongs to the account of a
# connection, which is within its client's account, which is within the server's. At every moment the bytes of an
# account are the sum of the charges within it. An account outlives the accounts within it.
#
# Used within the front only.

from libc.stddef cimport size_t

from inferd._native.assertion cimport assert_that

cdef enum Stage:
    # inferd_held_bytes calls some of them by other names, which Endpoint.ledger has
    STAGE_ARRIVING           # memory of a request message that is arriving
    STAGE_INFLATING          # complete, being inflated or waiting for that
    STAGE_WAITING            # complete, and not taken by a handler
    STAGE_WITH_HANDLER       # taken by the handler, which has not answered
    STAGE_COMPRESSING        # a response that is being compressed, or waits for that
    STAGE_UNSENT             # a response that waits for the peer to read it
    STAGE_FRAMED             # output that the socket has not taken, or that waits in it
    STAGES

cdef enum:
    # Memory in addition to the bytes of messages, measured, rounded up.
    MESSAGE_MEMORY = 768     # a message: the head of its block, the unused rest of a small block, the structure
    CALL_MEMORY = 2 << 10    # a call with one request: its structures, nghttp2's, those of its request
    PYTHON_CALL_MEMORY = 8 << 10  # a call that Python handles: a task, its coroutines, a context

cdef struct Account:
    Account *within          # NULL: the server's
    size_t bytes[STAGES]
    size_t total             # the sum of these
    size_t limit             # of `total`; SIZE_MAX: none. Callers enforce it, not the ledger.

cdef struct Charge:
    Account *account         # NULL: released, or never made
    Stage stage
    size_t bytes

# Whether an account's total is the sum of its stages; for debug builds and tests.
cdef bint account_agrees(const Account *account) noexcept nogil
# A connection's account begins to hold bytes (True), or holds none any more (False).
cdef void account_turned(bint holds) noexcept nogil


cdef inline bint account_exceeded(const Account *account) noexcept nogil:
    return account.total > account.limit


cdef inline size_t account_owed(const Account *account) noexcept nogil:
    # bytes that stay until the peer acts: sends the rest of a request, or reads a response
    return (account.bytes[<int>STAGE_ARRIVING] + account.bytes[<int>STAGE_UNSENT]
            + account.bytes[<int>STAGE_FRAMED])


cdef inline void account_add(Account *account, Stage stage, size_t bytes) noexcept nogil:
    if bytes == 0:
        return
    if account.total == 0:
        account_turned(True)
    while account != NULL:
        account.bytes[<int>stage] += bytes
        account.total += bytes
        account = account.within


cdef inline void account_subtract(Account *account, Stage stage, size_t bytes) noexcept nogil:
    if bytes == 0:
        return
    if account.total == bytes:
        account_turned(False)
    while account != NULL:
        assert_that(account.bytes[<int>stage] >= bytes and account.total >= bytes)
        account.bytes[<int>stage] -= bytes
        account.total -= bytes
        account = account.within


cdef inline void charge_make(Charge *charge, Account *account, Stage stage, size_t bytes) noexcept nogil:
    assert_that(charge.account == NULL)
    charge.account = account
    charge.stage = stage
    charge.bytes = bytes
    account_add(account, stage, bytes)


cdef inline void charge_resize(Charge *charge, size_t bytes) noexcept nogil:
    # the size of the message has changed
    assert_that(charge.account != NULL)
    if bytes > charge.bytes:
        account_add(charge.account, charge.stage, bytes - charge.bytes)
    else:
        account_subtract(charge.account, charge.stage, charge.bytes - bytes)
    charge.bytes = bytes


cdef inline void charge_move(Charge *charge, Stage stage) noexcept nogil:
    # the message has reached another stage
    cdef Account *account = charge.account
    assert_that(account != NULL)
    while account != NULL:
        assert_that(account.bytes[<int>charge.stage] >= charge.bytes)
        account.bytes[<int>charge.stage] -= charge.bytes
        account.bytes[<int>stage] += charge.bytes
        account = account.within
    charge.stage = stage


cdef inline void charge_hand(Charge *giver, Charge *taker) noexcept nogil:
    # moves the charge from one structure to another, together with its message
    assert_that(taker.account == NULL)
    taker[0] = giver[0]
    giver.account = NULL


cdef inline void charge_release(Charge *charge) noexcept nogil:
    # the message is gone; no effect if the charge was released before
    if charge.account != NULL:
        account_subtract(charge.account, charge.stage, charge.bytes)
        charge.account = NULL
