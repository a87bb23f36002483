"""The resources that one client uses over all its connections; limits are for a client, not for a connection."""

from libc.stdint cimport SIZE_MAX, UINT32_MAX, uint64_t

cdef uint64_t clients = 0  # made so far


cdef class ClientUse:
    """One client.

    Args:
        name: the client's name in messages.
        max_calls: open RPCs; further ones are refused. None: any number.
        max_streams: of these, streams; None: any number.
        max_bytes: of its unanswered requests and unread responses; None: any number.
    """

    def __init__(self, name: str, *, max_calls: int | None = None, max_streams: int | None = None,
                 max_bytes: int | None = None):
        global clients
        clients += 1
        self.client.number = clients
        self.name = name
        self.text = name.encode("utf-8", "replace").replace(b"\0", b" ")
        self.client.name = self.text
        self.client.max_calls = UINT32_MAX if max_calls is None else max_calls
        self.client.max_streams = UINT32_MAX if max_streams is None else max_streams
        self.client.account.limit = SIZE_MAX if max_bytes is None else max_bytes

    @property
    def number(self) -> int:
        """A number that no other client has or had; later clients have higher ones; never 0."""
        return self.client.number

    @property
    def calls(self) -> int:
        """Open RPCs."""
        return self.client.calls

    @property
    def streams(self) -> int:
        """Open RPCs that are streams."""
        return self.client.streams

    @property
    def bytes_held(self) -> int:
        """Bytes of its unanswered requests and unsent responses."""
        return self.client.account.total
