# Pseudo-random numbers as functions of a number: splitmix64 (Steele, Lea and Flood, OOPSLA 2014).

from libc.stdint cimport uint64_t

# The finaliser: a bijection that spreads every input bit over the output.
cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    x = (x ^ (x >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t> 0x94D049BB133111EB
    return x ^ (x >> 31)

# The number at `index` of the sequence with this seed.
cdef inline uint64_t mixed(uint64_t seed, uint64_t index) noexcept nogil:
    return mix(seed + (index + 1) * <uint64_t> 0x9E3779B97F4A7C15)

# The next number of the sequence in `state`.
cdef inline uint64_t draw(uint64_t *state) noexcept nogil:
    state[0] += <uint64_t> 0x9E3779B97F4A7C15
    return mix(state[0])
