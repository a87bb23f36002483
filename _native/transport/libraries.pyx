"""The versions of the libraries in C that the transport uses, as they are loaded: those of a wheel are its own."""

cdef extern from "openssl/crypto.h" nogil:
    const char *OpenSSL_version(int what)
    int OPENSSL_VERSION

cdef extern from "nghttp2/nghttp2.h" nogil:
    ctypedef struct nghttp2_info:
        const char *version_str
    nghttp2_info *nghttp2_version(int least)


def library_versions() -> list[str]:
    """Such as `OpenSSL 3.0.17` and `nghttp2 1.52.0`."""
    return [
        " ".join(OpenSSL_version(OPENSSL_VERSION).decode("ascii", "replace").split()[:2]),
        "nghttp2 " + nghttp2_version(0).version_str.decode("ascii", "replace"),
    ]
