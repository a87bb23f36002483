"""Adaptive delay: an instance waits for more requests only while that pays.

A batch of r rows takes about f + r s: a fixed time f, and s for each row. Say that an instance is free, all others are
busy, n requests with r rows wait, and the next request is expected in g. If the instance waits for it, the responses to
the n are later by g and by the time of the added rows, r/n s on average. The next request gains f - g: it need not wait
for the end of a batch that began without it, nor pay the fixed time of a batch of its own. So waiting pays while

    n (g + r/n s) < f - g,    which is    (n + 1) g + r s < f.

While another instance is free, waiting does not pay: that instance would execute the next request at once. Waiting
does not pay either if f is shorter than the time in which a thread wakes.

Waiting is a bet on the next request. The instance gives it up when no request has come within three times g, and when
it has waited for f in all. Whatever the delay, waiting requests are executed before their own time is over
(`inferd._native.scheduling.policy`).

g is learnt separately for each n: the mean time from when an instance found n requests, or the n-th came while it
waited, until one more came, whether the instance waited for it or not. This tells independent requests, whose g is the
same for every n, from clients that send the next request after each response, of which none comes once all of them
wait. For an n that has not been seen, the g of the largest smaller n counts. A g above f counts as f: waiting for so
long never pays, and after a quiet time the mean soon recovers.

f and s are the line through the sizes and times of the last batches (least squares, weights that fall exponentially).
As long as all batches have the same size, nothing tells f from s: then all of the time counts as fixed, so the sizes
vary if requests come often enough for that to matter. A batch that takes much longer than the others counts as four
times what it should have taken; the very first one, in which frameworks warm up, does not count.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    PATIENCE = 3
    MEAN_GAPS = 16           # about so many gaps count in the mean time until the next request
    MEAN_BATCHES = 32        # about so many batches count in the means of the curve
    TRUSTED_BATCHES = 8      # after so many, a batch that takes much longer is an exception
    EXCEPTION = 4
    WAKING_NS = 100_000      # a thread takes this long to wake from a wait, with all that the wake disturbs

cdef double VARIED = 1 / 16.0        # batches whose sizes vary at least so much determine the slope
cdef double LONGEST_NS = 1e11        # products with it do not overflow


# ---------------------------------------------------------------------------------------------------------------------
# What batches take

cdef inline void fit(ArrivalPredictor *predictor) noexcept nogil:
    cdef Curve *curve = &predictor.curve
    cdef double variance = curve.squares - curve.rows * curve.rows
    if variance > VARIED:
        curve.slope = max((curve.products - curve.rows * curve.ns) / variance, 0.0)
    curve.slope = min(curve.slope, curve.ns / curve.rows)
    predictor.row_ns = <int64_t>curve.slope
    predictor.fixed_ns = <int64_t>(curve.ns - curve.slope * curve.rows)


cdef void predictor_executed(ArrivalPredictor *predictor, uint32_t rows, int64_t ns) noexcept nogil:
    cdef Curve *curve = &predictor.curve
    cdef double x = rows
    cdef double y = min(<double>max(ns, 1), LONGEST_NS)
    cdef double weight
    curve.batches += 1
    if curve.batches == 1:
        return
    if curve.batches > TRUSTED_BATCHES:
        y = min(y, EXCEPTION * (predictor.fixed_ns + x * predictor.row_ns + 1))
    curve.batches = min(curve.batches, <uint32_t>MEAN_BATCHES + 1)
    weight = 1.0 / (curve.batches - 1)
    curve.rows += weight * (x - curve.rows)
    curve.ns += weight * (y - curve.ns)
    curve.squares += weight * (x * x - curve.squares)
    curve.products += weight * (x * y - curve.products)
    fit(predictor)


# ---------------------------------------------------------------------------------------------------------------------
# When requests come

cdef inline uint32_t index_of(uint64_t count) noexcept nogil:
    return <uint32_t>min(count, <uint64_t>COUNTS) - 1


cdef int64_t predictor_gap(const ArrivalPredictor *predictor, uint64_t count) noexcept nogil:
    cdef uint32_t i = index_of(count)
    while i and not predictor.seen[i]:
        i -= 1
    return predictor.gaps[i]


cdef void predictor_ask(ArrivalPredictor *predictor, uint32_t count, int64_t now) noexcept nogil:
    if not predictor.waiting:
        predictor.waiting = True
        predictor.since_ns = now
    elif predictor.asked == count:
        return
    predictor.asked = count
    predictor.asked_ns = now


cdef void predictor_take(ArrivalPredictor *predictor) noexcept nogil:
    predictor.waiting = False


cdef void predictor_arrival(ArrivalPredictor *predictor, int64_t now) noexcept nogil:
    cdef uint32_t i
    cdef int64_t gap
    if predictor.asked == 0:
        return
    i = index_of(predictor.asked)
    gap = min(max(now - predictor.asked_ns, 0), predictor.fixed_ns)
    if predictor.seen[i] < MEAN_GAPS:
        predictor.seen[i] += 1
    predictor.gaps[i] += (gap - predictor.gaps[i]) // predictor.seen[i]
    predictor.asked = predictor.asked + 1 if predictor.waiting else 0
    predictor.asked_ns = now


# ---------------------------------------------------------------------------------------------------------------------
# The decision

cdef inline bint pays(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows) noexcept nogil:
    if predictor.fixed_ns < WAKING_NS:
        return False
    cdef int64_t others_ns = (<int64_t>count + 1) * predictor_gap(predictor, count)
    return others_ns + <int64_t>rows * predictor.row_ns < predictor.fixed_ns


cdef int64_t predictor_due(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows) noexcept nogil:
    if predictor.idle or not pays(predictor, count, rows):
        return predictor.since_ns
    return min(predictor.asked_ns + PATIENCE * predictor_gap(predictor, count), predictor.since_ns + predictor.fixed_ns)


cdef uint64_t predictor_enough(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows,
                               uint64_t most) noexcept nogil:
    while rows < most and count < COUNTS:
        count += 1
        rows += 1
        if not pays(predictor, count, rows):
            return rows
    return enough_beyond(predictor, count, rows, most) if rows < most else rows


cdef uint64_t enough_beyond(const ArrivalPredictor *predictor, uint64_t count, uint64_t rows,
                            uint64_t most) noexcept nogil:
    # From COUNTS requests on, the gap is the same, so each further request adds the same time. A walk over all numbers
    # up to `most` would take milliseconds where batches may be large.
    cdef int64_t gap = predictor_gap(predictor, count)
    cdef int64_t left = predictor.fixed_ns - (<int64_t>count + 1) * gap - <int64_t>rows * predictor.row_ns
    cdef int64_t each = gap + predictor.row_ns
    if left <= each or predictor.fixed_ns < WAKING_NS:
        return rows + 1
    if each == 0:
        return most
    return min(rows + <uint64_t>((left + each - 1) // each), most)
