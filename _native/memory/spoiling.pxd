# Whether memory that is given back is filled with nonsense, so that code which still uses it is noticed: in debug and
# sanitizer builds, and in the simulation.

cdef enum:
    NONSENSE = 0xA5

cdef bint spoils
