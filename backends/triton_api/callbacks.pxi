"""The functions that the C sources of the API call about requests and logs, on any thread. A part of _host.pyx."""

cdef void host_log(TRITONSERVER_LogLevel level, const char *file, int line, const char *text) noexcept with gil:
    logger = pb_utils.Logger
    levels = (logger.INFO, logger.WARNING, logger.ERROR, logger.VERBOSE)
    place = text_of(file).rpartition("/")[2] if file != NULL else ""
    try:
        said = text_of(text) if text != NULL else ""
        logger.log(f"{place}:{line}: {said}", levels[level if 0 <= level < 4 else 0])
    except Exception:  # a lost log line is not reported
        pass


cdef c_bool host_logs(TRITONSERVER_LogLevel level) noexcept nogil:
    return level != TRITONSERVER_LOG_VERBOSE or verbose


cdef c_bool host_is_cancelled(void *owner) noexcept with gil:
    try:
        return (<Exchange>owner).request.is_cancelled()
    except Exception:
        return False


cdef void host_released(void *owner, uint32_t flags) noexcept with gil:
    (<Exchange>owner).release(flags)


cdef TRITONSERVER_Error *host_send(
    void *owner, TRITONBACKEND_Response *response, uint32_t flags, TRITONSERVER_Error *error
) noexcept with gil:
    try:
        (<Exchange>owner).send(response, flags, error)
    except BaseException as raised:
        return refusal(raised)
    return NULL


cdef void host_report(void *owner, int kind, uint32_t index, uint64_t infer_ns, uint64_t output_ns) noexcept with gil:
    exchange = <Exchange>owner
    try:
        current().channel.report(exchange.request._key, kind, index, infer_ns, output_ns)
    except Exception:  # the server has ended
        pass


cdef void host_forget(void *owner) noexcept with gil:
    exchange = <Exchange>owner
    try:
        exchange.abandon()
    except Exception:  # the server has ended, or the client has left
        pass
    Py_DECREF(exchange)


inferd_host.log = host_log
inferd_host.logs = host_logs
inferd_host.is_cancelled = host_is_cancelled
inferd_host.released = host_released
inferd_host.send = host_send
inferd_host.report = host_report
inferd_host.forget = host_forget
