# The end of a connection: one state after the other, and only the transitions in the table occur.
#
#   state            what holds                                                        next
#   CONN_OPEN        calls begin and are answered                                      any but CONN_LINGERING
#   CONN_ANNOUNCED   the peer has been asked to open no more streams; those that it    any later one but CONN_LINGERING
#                    opens meanwhile are still served
#   CONN_DRAINING    further streams are refused, the open calls are answered          CONN_PARTING, _SHUT, _GONE
#   CONN_PARTING     nothing is read or answered any more; the last output, a GOAWAY   CONN_SHUT, _GONE
#                    with the reason or the response to HTTP/1, is not framed yet
#   CONN_SHUT        all is framed, and calls are over; the socket's end for writing   CONN_LINGERING, _GONE
#                    closes behind these bytes, with TLS after a close_notify
#   CONN_LINGERING   that end is closed; bytes that the peer still sends are discarded CONN_GONE
#   CONN_GONE        the socket is closed
#
# Closing a socket while bytes in it are unread, or before more come, resets the connection, and the peer loses what it
# has not received. So the server keeps the socket open and reads it until the peer closes its end or its time is over.
# Rules for the time in each state are in server/front/keepalive.py (Age, Farewell) and in the stop of the front door.

from inferd._native.assertion cimport assert_move

cdef enum ConnState:
    CONN_OPEN
    CONN_ANNOUNCED
    CONN_DRAINING
    CONN_PARTING
    CONN_SHUT
    CONN_LINGERING
    CONN_GONE

cdef extern from *:
    """
    static const unsigned char inferd_closing_next[] = {0x5e, 0x5c, 0x58, 0x50, 0x60, 0x40, 0x00};
    """
    const unsigned char CLOSING_NEXT "inferd_closing_next"[7]


# Whether this transition is in the table.
cdef inline bint closing_allows(ConnState state, ConnState following) noexcept nogil:
    return CLOSING_NEXT[<int>state] >> <int>following & 1


# The only function that changes the state of a connection.
cdef inline void closing_move(ConnState *state, ConnState following) noexcept nogil:
    assert_move("the end of a connection", CLOSING_NEXT, state[0], following)
    state[0] = following


# The session is unusable: nothing more can be framed.
cdef inline void closing_break(ConnState *state) noexcept nogil:
    if state[0] < CONN_SHUT:
        closing_move(state, CONN_SHUT)
