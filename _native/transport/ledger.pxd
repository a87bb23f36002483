# The ledger: what peers make the server hold. A charge moves with its message and is released once.
#
# A message that a peer announces costs nothing. From the first byte that comes it has a charge, for the room that was
# taken for it; the charge goes with the message through the stages below, and another one with each answer. Charges
# belong to an account: a connection's, which is within its client's, which is within the server's. So the bytes of an
# account are the sum of the charges of all that is within it, at every moment. An account outlives what is within it.
#
# Used on the event loop only.

from libc.stddef cimport size_t

cdef enum Stage:
    STAGE_ARRIVING           # the room of a request message whose bytes come
    STAGE_INFLATING          # complete, and inflated now or when those before it are
    STAGE_QUEUED             # complete, and nobody has taken it
    STAGE_EXECUTED           # taken by who answers the call, who has not answered
    STAGE_ANSWERED           # an answer that is compressed, or waits for that
    STAGE_UNSENT             # an answer that waits for the peer to take it
    STAGES

cdef struct Account:
    Account *within          # NULL: the server's
    size_t bytes[STAGES]
    size_t total             # the sum of these
    size_t limit             # of `total`; 0: none. The ledger tells, others act.

cdef struct Charge:
    Account *account         # NULL: it is released, or was never made
    Stage stage
    size_t bytes

cdef extern from *:
    """
    #include <assert.h>
    """
    void ledger_assert "assert"(bint agreed) nogil

# Whether an account is the sum of its stages; for debug builds and tests.
cdef bint account_agrees(const Account *account) noexcept nogil
# A connection's account has begun to hold something, or holds nothing any more.
cdef void account_turned(bint holds) noexcept nogil


cdef inline bint account_exceeded(const Account *account) noexcept nogil:
    return account.limit != 0 and account.total > account.limit


cdef inline size_t account_owed(const Account *account) noexcept nogil:
    # what is there until the peer does something: sends the rest of a request, or takes an answer
    return account.bytes[<int>STAGE_ARRIVING] + account.bytes[<int>STAGE_UNSENT]


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
        ledger_assert(account.bytes[<int>stage] >= bytes and account.total >= bytes)
        account.bytes[<int>stage] -= bytes
        account.total -= bytes
        account = account.within


cdef inline void charge_make(Charge *charge, Account *account, Stage stage, size_t bytes) noexcept nogil:
    ledger_assert(charge.account == NULL)
    charge.account = account
    charge.stage = stage
    charge.bytes = bytes
    account_add(account, stage, bytes)


cdef inline void charge_resize(Charge *charge, size_t bytes) noexcept nogil:
    # the message has become longer or shorter
    ledger_assert(charge.account != NULL)
    if bytes > charge.bytes:
        account_add(charge.account, charge.stage, bytes - charge.bytes)
    else:
        account_subtract(charge.account, charge.stage, charge.bytes - bytes)
    charge.bytes = bytes


cdef inline void charge_move(Charge *charge, Stage stage) noexcept nogil:
    # the message has got to another stage
    cdef Account *account = charge.account
    ledger_assert(account != NULL)
    while account != NULL:
        account.bytes[<int>charge.stage] -= charge.bytes
        account.bytes[<int>stage] += charge.bytes
        account = account.within
    charge.stage = stage


cdef inline void charge_hand(Charge *giver, Charge *taker) noexcept nogil:
    # the charge goes from one structure to another, with its message
    ledger_assert(taker.account == NULL)
    taker[0] = giver[0]
    giver.account = NULL


cdef inline void charge_release(Charge *charge) noexcept nogil:
    # the message is gone; nothing when that has been said before
    if charge.account != NULL:
        account_subtract(charge.account, charge.stage, charge.bytes)
        charge.account = NULL
