"""SipHash-2-4 (https://www.aumasson.jp/siphash/): without the key nobody can choose data that collides."""

from libc.stdint cimport uint8_t, uint64_t


cdef inline uint64_t rotated(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline void sip_rounds(uint64_t *v, int count) noexcept nogil:
    cdef int _i
    for _i in range(count):
        v[0] += v[1]
        v[1] = rotated(v[1], 13) ^ v[0]
        v[0] = rotated(v[0], 32)
        v[2] += v[3]
        v[3] = rotated(v[3], 16) ^ v[2]
        v[0] += v[3]
        v[3] = rotated(v[3], 21) ^ v[0]
        v[2] += v[1]
        v[1] = rotated(v[1], 17) ^ v[2]
        v[2] = rotated(v[2], 32)


cdef inline uint64_t little_endian(const uint8_t *data, size_t size) noexcept nogil:
    cdef uint64_t word = 0
    cdef size_t i
    for i in range(size):
        word |= <uint64_t>data[i] << (8 * i)
    return word


cdef uint64_t siphash(const uint64_t *key, const uint8_t *data, size_t size) noexcept nogil:
    cdef uint64_t v[4]
    cdef uint64_t word
    cdef size_t left = size
    v[0] = key[0] ^ <uint64_t>0x736f6d6570736575
    v[1] = key[1] ^ <uint64_t>0x646f72616e646f6d
    v[2] = key[0] ^ <uint64_t>0x6c7967656e657261
    v[3] = key[1] ^ <uint64_t>0x7465646279746573
    while left >= 8:
        word = little_endian(data, 8)
        v[3] ^= word
        sip_rounds(v, 2)
        v[0] ^= word
        data += 8
        left -= 8
    word = <uint64_t>(size & 0xff) << 56 | little_endian(data, left)
    v[3] ^= word
    sip_rounds(v, 2)
    v[0] ^= word
    v[2] ^= 0xff
    sip_rounds(v, 4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def siphash_of(key: bytes, data: bytes) -> int:
    """SipHash-2-4 of `data` under a key of 16 bytes; for tests."""
    cdef uint64_t halves[2]
    halves[0] = int.from_bytes(key[:8], "little")
    halves[1] = int.from_bytes(key[8:], "little")
    return siphash(halves, <const uint8_t *><const char *>data, len(data))
