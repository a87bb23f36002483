"""Executions of instances in Python: whole, or begun and ended."""

from libc.stdint cimport int64_t

from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_fail, batch_fail_by
from inferd._native.execution.gather cimport batch_gather
from inferd._native.execution.isolation cimport execute_each, may_execute_each
from inferd._native.execution.python_batch cimport Batch, batch_for_python
from inferd._native.memory.owned cimport owned_drain
from inferd._native.request.request cimport requests_unwatch, requests_watch
from inferd._native.text cimport format_text, text_of

import logging

logger = logging.getLogger("inferd.instance")

cdef enum Step:
    EXECUTE
    BEGIN
    END


cdef void python_execute(PythonExecution *execution) noexcept nogil:
    if not (batch_gather(execution.batch) and watch(execution)):
        return
    with gil:
        owned_drain()
        call(execution, EXECUTE)
        unwatch(execution)


cdef void python_begin(PythonExecution *execution) noexcept nogil:
    execution.begun = execution.batch.count and batch_gather(execution.batch) and watch(execution)
    if execution.begun:
        with gil:
            execution.begun = call(execution, BEGIN)
            if not execution.begun:
                unwatch(execution)


cdef void python_end(PythonExecution *execution) noexcept nogil:
    if execution.begun:
        with gil:
            call(execution, END)
            unwatch(execution)


cdef void python_follow(PythonExecution *execution, const PythonExecution *before) noexcept nogil:
    cdef int64_t end = before.batch.output_start_ns if before.batch.output_start_ns else now_ns()
    cdef int64_t waited = end - execution.batch.input_end_ns
    if execution.begun and waited > 0:
        execution.batch.taken_ns += waited
        execution.batch.input_end_ns += waited


cdef bint call(PythonExecution *execution, Step step) noexcept:
    # whatever the backend raises, the batch is answered and the instance continues; False: it has raised, and is over
    cdef object instance = <object>execution.instance
    cdef Batch batch = batch_for_python(execution.batch, <str>execution.name)
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
        execution.batch.blamed = not execution.batch.failed and getattr(error, "blames_requests", False)
        if execution.isolates and not execution.watched.stopped and may_execute_each(execution.batch):
            logger.warning("instance %s: a batch of %d requests failed, and is executed request by request: %s",
                           <str>execution.name, execution.batch.count, text)
            with nogil:
                execute_each(execution.batch, execute_one, execution)
            return False
        text = batch_fail_by(execution.batch, text)
        if not execution.watched.stopped:
            logger.error("instance %s failed a batch of %d requests: %s", <str>execution.name, execution.batch.count,
                         text, exc_info=logger.isEnabledFor(logging.DEBUG))
        return False
    finally:
        batch.batch = NULL  # a backend that keeps the object gets errors from now on


cdef void execute_one(NativeBatch *batch, void *context) noexcept nogil:
    cdef PythonExecution *execution = <PythonExecution *>context
    cdef int64_t gathered = batch.input_end_ns
    cdef bint is_gathered = batch_gather(batch)
    batch.input_end_ns = gathered  # what follows is execution
    if is_gathered:
        with gil:
            call_for_one(execution)


cdef void call_for_one(PythonExecution *execution) noexcept:
    cdef NativeBatch *batch = execution.batch
    cdef Batch view = batch_for_python(batch, <str>execution.name)
    try:
        (<object>execution.instance).execute(view)
    except BaseException as error:
        text = text_of(error)
        batch.blamed = not batch.failed and getattr(error, "blames_requests", False)
        text = batch_fail_by(batch, text)
        logger.error("instance %s failed a request: %s", <str>execution.name, text,
                     exc_info=logger.isEnabledFor(logging.DEBUG))
    finally:
        view.batch = NULL


# ---------------------------------------------------------------------------------------------------------------------
# Stopping

cdef bint watch(PythonExecution *execution) noexcept nogil:
    # False: no client waits for the batch, so it need not begin
    if not execution.stoppable:
        return True
    execution.watched.requests = execution.batch.requests
    execution.watched.count = execution.batch.count
    execution.watched.stop = stop
    execution.watched.owner = execution
    if requests_watch(&execution.watched):
        return True
    execution.batch.stopped = True
    batch_fail(execution.batch, format_text("no client waits for the response"))
    return False


cdef void unwatch(PythonExecution *execution) noexcept:
    if not execution.stoppable:
        return
    with nogil:
        requests_unwatch(&execution.watched)
    if not execution.watched.stopped:
        return
    execution.batch.stopped = True
    logger.debug("instance %s: a batch of %d requests was stopped, because no client waits for it", <str>execution.name,
                 execution.batch.count)
    try:
        (<object>execution.instance).resume()
    except Exception:
        logger.exception("instance %s", <str>execution.name)


cdef void stop(void *owner) noexcept nogil:
    cdef PythonExecution *execution = <PythonExecution *>owner
    with gil:
        try:
            (<object>execution.instance).stop()
        except Exception:
            logger.exception("instance %s", <str>execution.name)
