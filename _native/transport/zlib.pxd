# The part of zlib that is used here.

cdef extern from "zlib.h" nogil:
    ctypedef struct z_stream:
        unsigned char *next_in       # only read
        unsigned int avail_in
        unsigned char *next_out
        unsigned int avail_out
    enum:
        Z_OK
        Z_STREAM_END
        Z_BUF_ERROR
        Z_MEM_ERROR
        Z_NO_FLUSH
        Z_FINISH
        Z_DEFLATED
        Z_DEFAULT_STRATEGY
    int inflateInit2(z_stream *stream, int window_bits)
    int inflate(z_stream *stream, int flush)
    int inflateEnd(z_stream *stream)
    int deflateInit2(z_stream *stream, int level, int method, int window_bits, int memory_level, int strategy)
    int deflate(z_stream *stream, int flush)
    int deflateEnd(z_stream *stream)
