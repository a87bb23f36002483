# EXECUTE and DONE.

from inferd.backends.python._channel cimport Channel

# On the attendant's thread: let the front read the work socket of the worker that is up, and stop that.
cdef void results_open(Channel *channel) noexcept nogil
cdef void results_close(Channel *channel) noexcept nogil

# The capsules for NativeInstance.executor, NativeInstance.gate and NativeInstance.remote.
cdef object make_executor(Channel *channel)
cdef object make_gate(Channel *channel)
cdef object make_remote(Channel *channel)
