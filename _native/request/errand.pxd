# Something to be done on the event loop by request of another thread; see bridge_post in _native.request.bridge.

cdef struct Errand:
    # lies in what it is about
    void (*run)(Errand *errand) noexcept nogil
    Errand *next
    void *owner              # what it is about, where it does not begin with the errand
