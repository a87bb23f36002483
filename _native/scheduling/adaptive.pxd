# Whether it pays to wait for more requests: what a queue has learnt, and the decision. Without clock, lock or thread.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    COUNTS = 64              # numbers of waiting requests that are told apart

cdef struct Curve:
    # the times of the last batches, newer ones weigh more
    uint32_t batches         # how many, up to what the means go over
    double rows              # means
    double ns
    double squares           # of the rows
    double products          # of rows and times
    double slope             # ns for each row, as far as the sizes have told it

cdef struct ArrivalPredictor:
    int64_t gaps[COUNTS]     # with so many waiting: the mean time until the next request came, fixed_ns at most
    uint8_t seen[COUNTS]     # how often that was seen, up to what the mean goes over
    int64_t fixed_ns         # what a batch takes however small it is; 0: not known yet
    int64_t row_ns           # what each of its rows takes in addition
    Curve curve
    uint32_t idle            # instances that have nothing to do, beside the one that asks
    uint32_t asked           # requests that waited when an instance asked last; 0: another one has come since
    int64_t asked_ns         # when, or when the last of them came if it has waited since
    bint waiting             # it has waited since
    int64_t since_ns         # as long

# A batch of so many rows has taken so long.
cdef void predictor_executed(ArrivalPredictor *predictor, uint32_t rows, int64_t ns) noexcept nogil
# An instance that is free finds so many requests; it takes some of them, or waits.
cdef void predictor_ask(ArrivalPredictor *predictor, uint32_t count, int64_t now) noexcept nogil
cdef void predictor_take(ArrivalPredictor *predictor) noexcept nogil
# A request has come.
cdef void predictor_arrival(ArrivalPredictor *predictor, int64_t now) noexcept nogil
# Until when an instance that has asked waits with `count` requests of `rows` rows; a time that is over by now if it
# does not pay.
cdef int64_t predictor_due(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows) noexcept nogil
# When a batch of so many rows begins at the latest that is to be executed by `end_ns`.
cdef inline int64_t predictor_latest(const ArrivalPredictor *predictor, uint64_t rows, int64_t end_ns) noexcept nogil:
    return end_ns - predictor.fixed_ns - <int64_t>rows * predictor.row_ns
# With how many rows, of one request each from `rows` on, it does not pay any more; `most` if it pays with fewer.
cdef uint64_t predictor_enough(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows,
                               uint64_t most) noexcept nogil
# The mean time until the next request comes while so many wait.
cdef int64_t predictor_gap(const ArrivalPredictor *predictor, uint64_t count) noexcept nogil
