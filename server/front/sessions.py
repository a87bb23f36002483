"""TLS sessions are not resumed: a resumed one escapes the check of the client's certificate.

Python's ssl can keep OpenSSL from issuing tickets, but not from keeping sessions by id for clients of TLS 1.2: that is
a mode of OpenSSL's SSL_CTX which ssl does not expose. So this module sets it through the pointer behind the SSLContext.
Where that fails, the server refuses a connection with a resumed session after its handshake (`is_resumed`).
"""

from __future__ import annotations

import _ssl
import ctypes
import ssl
import sys

_SET_MODE, _GET_MODE = 44, 45  # SSL_CTRL_SET_SESS_CACHE_MODE, SSL_CTRL_GET_SESS_CACHE_MODE
_OFF, _SERVER = 0, 2  # SSL_SESS_CACHE_OFF; SSL_SESS_CACHE_SERVER, in which a new context is


def keep_none(context: ssl.SSLContext) -> bool:
    """Keep a new server context from resuming sessions; return whether OpenSSL could be configured."""
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    control = _control()
    if control is None:
        return False
    # An SSLContext of CPython is an object's head and then the pointer, in every version.
    pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    if control(pointer, _GET_MODE, 0, None) != _SERVER:
        return False
    control(pointer, _SET_MODE, _OFF, None)
    return True


def _control() -> ctypes._NamedFuncPointer | None:
    """SSL_CTX_ctrl of the OpenSSL that Python's ssl uses; None where it cannot be found."""
    if sys.implementation.name != "cpython":
        return None
    try:
        function = ctypes.CDLL(getattr(_ssl, "__file__", None)).SSL_CTX_ctrl
    except (OSError, AttributeError):  # linked into the interpreter without its names
        return None
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p]
    return function


def is_resumed(tls: ssl.SSLObject) -> bool:
    """Whether a connection resumes the session of an earlier one, which the server must refuse."""
    return bool(tls.session_reused)
