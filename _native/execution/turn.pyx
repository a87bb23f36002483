"""Executions in Python, each a turn of an instance: whole, or begun and ended."""

from libc.stdint cimport int64_t

from _native.clock cimport now_ns
from _native.execution.batch cimport batch_fail, batch_fail_by
from _native.execution.gather cimport batch_gather
from _native.execution.python_batch cimport Batch, batch_for_python
from _native.request.request cimport requests_unwatch, requests_watch
from _native.text cimport format_text, text_of

import logging

logger = logging.getLogger("inferd.instance")

cdef enum Step:
    EXECUTE
    BEGIN
    END


cdef void turn_execute(Turn *turn) noexcept nogil:
    if not (batch_gather(turn.batch) and watch(turn)):
        return
    with gil:
        call(turn, EXECUTE)
        unwatch(turn)


cdef void turn_begin(Turn *turn) noexcept nogil:
    turn.begun = turn.batch.count and batch_gather(turn.batch) and watch(turn)
    if turn.begun:
        with gil:
            turn.begun = call(turn, BEGIN)
            if not turn.begun:
                unwatch(turn)


cdef void turn_end(Turn *turn) noexcept nogil:
    if turn.begun:
        with gil:
            call(turn, END)
            unwatch(turn)


cdef void turn_succeed(Turn *turn, const Turn *before) noexcept nogil:
    cdef int64_t end = before.batch.output_start_ns if before.batch.output_start_ns else now_ns()
    cdef int64_t waited = end - turn.batch.input_end_ns
    if turn.begun and waited > 0:
        turn.batch.taken_ns += waited
        turn.batch.input_end_ns += waited


cdef bint call(Turn *turn, Step step) noexcept:
    # whatever the backend raises, the batch is answered and the instance goes on; False: it has raised
    cdef object instance = <object>turn.instance
    cdef Batch batch = batch_for_python(turn.batch, <str>turn.name)
    try:
        if step == EXECUTE:
            instance.execute(batch)
        elif step == BEGIN:
            instance.begin(batch)
        else:
            instance.end(batch)
        return True
    except BaseException as error:
        text = text_of(error)
        turn.batch.blamed = not turn.batch.failed and getattr(error, "blames_requests", False)
        text = batch_fail_by(turn.batch, text)
        if not turn.watched.stopped:
            logger.error("instance %s failed a batch of %d requests: %s", <str>turn.name, turn.batch.count, text,
                         exc_info=logger.isEnabledFor(logging.DEBUG))
        return False
    finally:
        batch.batch = NULL  # whoever keeps the object finds that it is over


# ---------------------------------------------------------------------------------------------------------------------
# Stopping

cdef bint watch(Turn *turn) noexcept nogil:
    # False: nobody waits for the batch, it need not even begin
    if not turn.stoppable:
        return True
    turn.watched.requests = turn.batch.requests
    turn.watched.count = turn.batch.count
    turn.watched.stop = stop
    turn.watched.owner = turn
    if requests_watch(&turn.watched):
        return True
    turn.batch.stopped = True
    batch_fail(turn.batch, format_text("nobody waits for the answer"))
    return False


cdef void unwatch(Turn *turn) noexcept:
    if not turn.stoppable:
        return
    with nogil:
        requests_unwatch(&turn.watched)
    if not turn.watched.stopped:
        return
    turn.batch.stopped = True
    logger.debug("instance %s: a batch of %d requests was stopped, nobody waits for it", <str>turn.name,
                 turn.batch.count)
    try:
        (<object>turn.instance).resume()
    except Exception:
        logger.exception("instance %s", <str>turn.name)


cdef void stop(void *owner) noexcept nogil:
    cdef Turn *turn = <Turn *>owner
    with gil:
        try:
            (<object>turn.instance).stop()
        except Exception:
            logger.exception("instance %s", <str>turn.name)
