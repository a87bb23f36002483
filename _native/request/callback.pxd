# Something to be done on the event loop by request of another thread; see bridge_post in _native.request.bridge.

cdef struct PostedCallback:
    # lies in what it is about
    void (*run)(PostedCallback *callback) noexcept nogil
    PostedCallback *next
    void *owner              # what it is about, where it does not begin with the callback
