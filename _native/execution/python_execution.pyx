"""Executions of instances in Python: whole, or begun and ended."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_fail, batch_fail_by
from inferd._native.execution.gather cimport batch_gather, batch_give_inputs
from inferd._native.execution.python_batch cimport Batch, batch_for_python
from inferd._native.memory.owned cimport owned_drain
from inferd._native.request.request cimport Request, request_fail, requests_unwatch, requests_watch
from inferd._native.status cimport STATUS_INTERNAL, STATUS_INVALID_ARGUMENT
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
    # whatever the backend raises, the batch is answered and the instance continues; False: it has raised
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
        if step == EXECUTE and may_isolate(execution):
            logger.warning("instance %s: a batch of %d requests failed, and is executed request by request: %s",
                           <str>execution.name, execution.batch.count, text)
            execute_each(execution, instance)
            return True
        text = batch_fail_by(execution.batch, text)
        if not execution.watched.stopped:
            logger.error("instance %s failed a batch of %d requests: %s", <str>execution.name, execution.batch.count,
                         text, exc_info=logger.isEnabledFor(logging.DEBUG))
        return False
    finally:
        batch.batch = NULL  # a backend that keeps the object gets errors from now on


# ---------------------------------------------------------------------------------------------------------------------
# Requests of a failed batch, each alone

cdef bint may_isolate(const PythonExecution *execution) noexcept:
    return (execution.isolates and execution.batch.count > 1 and not execution.watched.stopped
            and not execution.batch.requests[0].is_warmup)


cdef void execute_each(PythonExecution *execution, object instance) noexcept:
    # Requests that fail again get their own error, the others their response. The batch itself then has not failed.
    cdef NativeBatch *batch = execution.batch
    cdef Request **requests = batch.requests
    cdef uint32_t count = batch.count
    cdef uint32_t rows = batch.rows
    cdef uint32_t i
    batch.count = 1
    for i in range(count):
        batch.requests = requests + i
        batch.rows = requests[i].rows
        forgive(batch)
        execute_one(execution, instance)
        if batch.failed:
            request_fail(requests[i], STATUS_INVALID_ARGUMENT if batch.blamed else STATUS_INTERNAL, batch.details)
            batch.details = NULL
    forgive(batch)
    batch.requests = requests
    batch.count = count
    batch.rows = rows


cdef void forgive(NativeBatch *batch) noexcept:
    batch.failed = batch.blamed = False
    free(batch.details)
    batch.details = NULL


cdef void execute_one(PythonExecution *execution, object instance) noexcept:
    cdef NativeBatch *batch = execution.batch
    cdef int64_t gathered = batch.input_end_ns
    cdef bint is_gathered
    with nogil:
        batch_give_inputs(batch)
        is_gathered = batch_gather(batch)
    batch.input_end_ns = gathered  # what follows is execution
    if not is_gathered:
        return
    view = batch_for_python(batch, <str>execution.name)
    try:
        instance.execute(view)
    except BaseException as error:
        text = text_of(error)
        batch.blamed = not batch.failed and getattr(error, "blames_requests", False)
        text = batch_fail_by(batch, text)
        logger.error("instance %s failed a request: %s", <str>execution.name, text,
                     exc_info=logger.isEnabledFor(logging.DEBUG))
    finally:
        (<Batch>view).batch = NULL


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
    batch_fail(execution.batch, format_text("nobody waits for the answer"))
    return False


cdef void unwatch(PythonExecution *execution) noexcept:
    if not execution.stoppable:
        return
    with nogil:
        requests_unwatch(&execution.watched)
    if not execution.watched.stopped:
        return
    execution.batch.stopped = True
    logger.debug("instance %s: a batch of %d requests was stopped, nobody waits for it", <str>execution.name,
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
