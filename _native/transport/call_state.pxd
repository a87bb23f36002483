# The states of a call, one for each direction. Only the transitions in the tables occur; debug and sanitizer builds
# check each.
#
#   receiving                  received                        next
#   RECEIVING_HEADERS          the end of the header block     RECEIVING_PREFIX
#   RECEIVING_PREFIX           the fifth byte of a prefix      RECEIVING_MESSAGE, at once RECEIVING_PREFIX again if the
#                                                              message has no bytes
#                              the client's half-close         RECEIVED_ALL
#   RECEIVING_MESSAGE          its last byte                   RECEIVING_PREFIX
#                              the client's half-close         RECEIVED_ALL: the call has failed
#   RECEIVED_ALL               nothing
#
#   response                   sent by the service             next
#   RESPONSE_NONE              initial metadata or a message   RESPONSE_OPEN
#                              the status                      RESPONSE_READY; at once RESPONSE_LAST if no message is
#                                                              being compressed: headers and trailers are one frame
#                              the message of a unary call,    RESPONSE_READY
#                              and its status
#   RESPONSE_OPEN              a message                       stays
#                              the status                      RESPONSE_LAST
#   RESPONSE_READY             the message is compressed, or   RESPONSE_LAST
#                              need not be
#   RESPONSE_LAST              nothing; queued messages leave
#   any but RESPONSE_CUT       the call is reset               RESPONSE_CUT: queued messages are discarded

from inferd._native.assertion cimport assert_move

cdef enum Receiving:
    RECEIVING_HEADERS        # the header block is not complete
    RECEIVING_PREFIX         # between messages, or within the five bytes in front of one
    RECEIVING_MESSAGE        # within a message
    RECEIVED_ALL             # the client has half-closed

cdef enum ResponseState:
    # from RESPONSE_READY on the status is final, and nothing more is queued
    RESPONSE_NONE            # neither headers nor a message yet
    RESPONSE_OPEN            # the headers are submitted
    RESPONSE_READY           # the headers will be submitted with the message
    RESPONSE_LAST            # the headers are submitted, and the status is final
    RESPONSE_CUT             # RST_STREAM is submitted

cdef extern from *:
    """
    static const unsigned char inferd_receiving_next[] = {0x02, 0x0c, 0x0a, 0x00};
    static const unsigned char inferd_response_next[] = {0x16, 0x18, 0x18, 0x10, 0x00};
    """
    const unsigned char RECEIVING_NEXT "inferd_receiving_next"[4]
    const unsigned char RESPONSE_NEXT "inferd_response_next"[5]


# The only functions that change the states.
cdef inline void receiving_move(Receiving *state, Receiving following) noexcept nogil:
    assert_move("receiving a call", RECEIVING_NEXT, state[0], following)
    state[0] = following


cdef inline void response_move(ResponseState *state, ResponseState following) noexcept nogil:
    assert_move("the response of a call", RESPONSE_NEXT, state[0], following)
    state[0] = following
