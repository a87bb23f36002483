from backends.python._channel cimport Channel

# The capsule for NativeInstance.executor.
cdef object make_executor(Channel *channel)
