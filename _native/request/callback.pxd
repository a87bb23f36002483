# A function that another thread asks the front to run; see bridge_post in inferd._native.request.bridge.

cdef struct PostedCallback:
    # a member of the structure that it belongs to
    void (*run)(PostedCallback *callback) noexcept nogil
    PostedCallback *next
    void *owner              # that structure, if it does not begin with the callback
