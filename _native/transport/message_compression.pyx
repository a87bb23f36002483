"""Compression of the messages of calls: large ones on the thread pool, so that they do not keep the I/O thread.

The caller keeps the order of messages: it gives one message of each call and direction at a time.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from inferd._native.atomic cimport load32, store32
from inferd._native.memory.resource cimport block_give
from inferd._native.transport.compression cimport (
    RESULT_CANCELLED,
    RESULT_MORE,
    RESULT_NO_MEMORY,
    RESULT_OK,
    RESULT_TOO_LARGE,
    Deflater,
    Encoding,
    Inflated,
    Inflater,
    Result,
    deflate_message,
    deflater_begin,
    deflater_end,
    deflater_slice,
    inflate_message,
    inflater_begin,
    inflater_end,
    inflater_slice,
)
from inferd._native.transport.ledger cimport STAGE_INFLATING, Charge, charge_make, charge_release, charge_resize
from inferd._native.transport.message cimport Incoming, incoming_free
from inferd._native.transport.outgoing cimport Outgoing, outgoing_free
from inferd._native.transport.thread_pool cimport Job, ThreadPool, thread_pool_submit, thread_pool_withdraw

cdef enum:
    COMPRESS_HERE = 8 << 10          # bytes up to which a response is compressed at once, on the calling thread
    INFLATE_HERE = 16 << 10          # the same for received messages
    INFLATED_HERE = 64 << 10         # and for their inflated size
    BEGINNING = 16 << 10             # the cost of beginning a job, in bytes
    COUNTED = 1 << 20                # steps in which the memory of unfinished output is counted

cdef struct Task:
    Job job
    MessageOwner owner       # without a call: it is gone
    Charge *charge           # of the message, which the job holds
    Charge output            # for the part of the result that exists

cdef struct Inflation:
    Task task
    Incoming *message
    inflated_fn then
    Encoding encoding
    size_t limit
    size_t behind            # bytes of headers that are to follow the message
    Result result            # RESULT_MORE: not done
    Inflater inflater
    Inflated out

cdef struct Deflation:
    Task task
    Outgoing *plain
    Outgoing *deflated       # NULL: the plain one is sent
    Deflater deflater
    deflated_fn then
    Encoding encoding
    int level

ctypedef uint64_t (*run_fn)(Job *job) noexcept nogil
ctypedef void (*done_fn)(Job *job) noexcept nogil


cdef void *task_new(const MessageOwner *owner, size_t size, run_fn run, done_fn done) noexcept nogil:
    # a zeroed structure that begins with a Task, which is set; NULL: no memory
    cdef Task *task = <Task *>calloc(1, size)
    if task != NULL:
        task.job.run = run
        task.job.done = done
        task.owner = owner[0]
    return task


cdef void compression_abandon(Job **job) noexcept nogil:
    # A job that no thread has begun ends at once; a running one is cancelled. So at most one message for each thread
    # is held for calls that are over; these messages are charged to the server only.
    cdef Task *task = <Task *>job[0]
    cdef ThreadPool *thread_pool
    if task == NULL:
        return
    thread_pool = task.owner.thread_pool
    task.owner.call = NULL
    job[0] = NULL
    if thread_pool_withdraw(thread_pool, &task.job):
        task.job.done(&task.job)
        return
    store32(&task.job.cancelled, 1)
    charge_release(task.charge)
    charge_make(task.charge, &thread_pool.departed, task.charge.stage, task.charge.bytes)
    charge_release(&task.output)
    charge_make(&task.output, &thread_pool.departed, STAGE_INFLATING, task.output.bytes)


# ---------------------------------------------------------------------------------------------------------------------
# Requests

cdef bint message_inflate(const MessageOwner *owner, Incoming *message, Encoding encoding, size_t limit, size_t behind,
                          Result *result, inflated_fn then) noexcept nogil:
    cdef size_t here = limit
    cdef Inflated out
    if owner.thread_pool != NULL:
        here = min(limit, <size_t>INFLATED_HERE)
    if owner.thread_pool == NULL or message.size <= INFLATE_HERE:
        result[0] = inflate_message(encoding, message.data, message.size, here, behind, &out)
        if result[0] == RESULT_OK:
            take_inflated(message, &out)
        if result[0] != RESULT_TOO_LARGE or here == limit:
            return True
    result[0] = RESULT_NO_MEMORY
    return not begin_inflation(owner, message, encoding, limit, behind, then)


cdef void take_inflated(Incoming *message, const Inflated *out) noexcept nogil:
    block_give(message.block)
    message.block = out.block
    message.data = out.data
    message.size = out.size


cdef bint begin_inflation(const MessageOwner *owner, Incoming *message, Encoding encoding, size_t limit, size_t behind,
                          inflated_fn then) noexcept nogil:
    cdef Inflation *inflation = <Inflation *>task_new(owner, sizeof(Inflation), run_inflation, inflation_done)
    if inflation == NULL:
        return False
    inflation.task.job.grew = inflation_grew
    inflation.message = message
    inflation.task.charge = &message.charge
    inflation.then = then
    inflation.encoding = encoding
    inflation.limit = limit
    inflation.behind = behind
    inflation.result = RESULT_CANCELLED
    if not thread_pool_submit(owner.thread_pool, &inflation.task.job, owner.client):
        free(inflation)
        return False
    owner.job[0] = &inflation.task.job
    return True


cdef uint64_t run_inflation(Job *job) noexcept nogil:
    cdef Inflation *inflation = <Inflation *>job
    cdef size_t worked = 0
    cdef uint64_t cost = 0
    job.whole = True
    if load32(&job.cancelled):
        inflation.result = RESULT_CANCELLED
        return 0
    if not inflation.inflater.begun:
        cost = BEGINNING
        inflation.result = inflater_begin(&inflation.inflater, inflation.encoding, inflation.message.data,
                                          inflation.message.size, inflation.limit, inflation.behind)
    if inflation.inflater.begun:
        inflation.result = inflater_slice(&inflation.inflater, &worked, &inflation.out)
    job.whole = inflation.result != RESULT_MORE
    if not job.whole:
        job.output = (inflation.inflater.room.used + COUNTED - 1) & ~<size_t>(COUNTED - 1)
    return cost + worked


cdef void inflation_grew(Job *job) noexcept nogil:
    # Jobs of all clients are begun, and take turns: what they have inflated so far counts like what they will have.
    cdef Task *task = <Task *>job
    if task.output.account == NULL:
        charge_make(&task.output, task.owner.account, STAGE_INFLATING, job.told)
    else:
        charge_resize(&task.output, job.told)


cdef void inflation_done(Job *job) noexcept nogil:
    cdef Inflation *inflation = <Inflation *>job
    charge_release(&inflation.task.output)
    inflater_end(&inflation.inflater)
    if inflation.result == RESULT_MORE:
        inflation.result = RESULT_CANCELLED
    if inflation.result == RESULT_OK:
        take_inflated(inflation.message, &inflation.out)
    if inflation.task.owner.call == NULL:
        incoming_free(inflation.message)
    else:
        inflation.task.owner.job[0] = NULL
        inflation.then(inflation.task.owner.call, inflation.message, inflation.result)
    free(inflation)


# ---------------------------------------------------------------------------------------------------------------------
# Responses

cdef bint message_deflate(const MessageOwner *owner, Outgoing *plain, Encoding encoding, int level,
                          Outgoing **deflated, deflated_fn then) noexcept nogil:
    if plain.left > COMPRESS_HERE and owner.thread_pool != NULL and (
            begin_deflation(owner, plain, encoding, level, then)):
        return False
    deflated[0] = deflate_message(encoding, level, plain)
    return True


cdef bint begin_deflation(const MessageOwner *owner, Outgoing *plain, Encoding encoding, int level,
                          deflated_fn then) noexcept nogil:
    cdef Deflation *deflation = <Deflation *>task_new(owner, sizeof(Deflation), run_deflation, deflation_done)
    if deflation == NULL:
        return False
    deflation.plain = plain
    deflation.task.charge = &plain.charge
    deflation.then = then
    deflation.encoding = encoding
    deflation.level = level
    if not thread_pool_submit(owner.thread_pool, &deflation.task.job, owner.client):
        free(deflation)
        return False
    owner.job[0] = &deflation.task.job
    return True


cdef uint64_t run_deflation(Job *job) noexcept nogil:
    cdef Deflation *deflation = <Deflation *>job
    cdef size_t worked = 0
    cdef uint64_t cost = 0
    job.whole = True
    if load32(&job.cancelled):
        return 0
    if not deflation.deflater.begun:
        cost = BEGINNING
        if not deflater_begin(&deflation.deflater, deflation.encoding, deflation.level, deflation.plain):
            return cost
    job.whole = deflater_slice(&deflation.deflater, &worked, &deflation.deflated) != RESULT_MORE
    return cost + worked


cdef void deflation_done(Job *job) noexcept nogil:
    cdef Deflation *deflation = <Deflation *>job
    deflater_end(&deflation.deflater)
    if deflation.task.owner.call == NULL:
        outgoing_free(deflation.plain)
        if deflation.deflated != NULL:
            outgoing_free(deflation.deflated)
    else:
        deflation.task.owner.job[0] = NULL
        deflation.then(deflation.task.owner.call, deflation.plain, deflation.deflated)
    free(deflation)
