# Whether memory that is given back is filled with nonsense, which shows code that still uses it. It is so in debug and
# sanitizer builds, and in the simulation.

cdef enum:
    NONSENSE = 0xA5

cdef bint spoils
