"""Errors, from the backend to Python and back. A part of _host.pyx."""

cdef str text_of(const char *text):
    return (<bytes>text).decode("utf-8", "backslashreplace")


cdef object taken(TRITONSERVER_Error *error):
    # A backend's error as a TritonError; frees the backend's error.
    made = error_of(error)
    TRITONSERVER_ErrorDelete(error)
    return made


cdef object error_of(TRITONSERVER_Error *error):
    code = error.code if 0 <= error.code <= 7 else TRITONSERVER_ERROR_INTERNAL
    return pb_utils.TritonError(text_of(error.text), code)


cdef object failure(str text):
    # a response with this error
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))


cdef int check(TRITONSERVER_Error *error) except -1:
    if error != NULL:
        raise pb_utils.TritonModelException(taken(error).message())
    return 0


cdef TRITONSERVER_Error *refusal(error) noexcept:
    wrong = isinstance(error, pb_utils.TritonModelException)
    text = (str(error) if wrong else f"{type(error).__name__}: {error}").encode("utf-8", "replace")
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG if wrong else TRITONSERVER_ERROR_INTERNAL, text)
