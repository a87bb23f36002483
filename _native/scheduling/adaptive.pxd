# Adaptive delay: estimates from past requests and batches whether waiting for more requests pays. Without clock, lock
# or thread.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    COUNTS = 64              # numbers of waiting requests that are distinguished

cdef struct Curve:
    # the times of the last batches; newer ones have more weight
    uint32_t batches         # their number, up to the number over which the means are taken
    double rows              # means
    double ns
    double squares           # of the rows
    double products          # of rows and times
    double slope             # ns for each row, as estimated from batches of different sizes

cdef struct ArrivalPredictor:
    int64_t gaps[COUNTS]     # by number of waiting requests: the mean time until the next request, fixed_ns at most
    uint8_t seen[COUNTS]     # how often that was measured, up to the number over which the mean is taken
    int64_t fixed_ns         # the time of a batch without rows; 0: unknown
    int64_t row_ns           # the time that each row adds
    Curve curve
    uint32_t idle            # other instances without work
    uint32_t asked           # requests that waited when an instance last asked; 0: another request has come since
    int64_t asked_ns         # the time of that question; if the instance waits, the time when the last request came
    bint waiting             # the instance waits
    int64_t since_ns         # the time when it began to wait

# A batch of `rows` rows was executed in `ns` nanoseconds.
cdef void predictor_executed(ArrivalPredictor *predictor, uint32_t rows, int64_t ns) noexcept nogil
# An idle instance finds `count` requests; it takes some of them (predictor_take), or waits.
cdef void predictor_ask(ArrivalPredictor *predictor, uint32_t count, int64_t now) noexcept nogil
cdef void predictor_take(ArrivalPredictor *predictor) noexcept nogil
# A request has come.
cdef void predictor_arrival(ArrivalPredictor *predictor, int64_t now) noexcept nogil
# The time until which an idle instance waits with `count` requests of `rows` rows; it is past if waiting does not pay.
cdef int64_t predictor_due(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows) noexcept nogil
# The latest time at which a batch of so many rows must begin to be executed by `end_ns`.
cdef inline int64_t predictor_latest(const ArrivalPredictor *predictor, uint64_t rows, int64_t end_ns) noexcept nogil:
    return end_ns - predictor.fixed_ns - <int64_t>rows * predictor.row_ns
# The number of rows, after adding requests of one row each, at which waiting stops to pay; `most` at most.
cdef uint64_t predictor_enough(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows,
                               uint64_t most) noexcept nogil
# The mean time until the next request comes while `count` wait.
cdef int64_t predictor_gap(const ArrivalPredictor *predictor, uint64_t count) noexcept nogil
