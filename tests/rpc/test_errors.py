"""What a client is told of an error."""

from inferd.server.errors import Status, status_and_text


def test_memory_that_is_not_there_is_exhausted():
    """The server has done nothing wrong, and the client may try again."""
    assert status_and_text(MemoryError("asked for 8 bytes")) == (
        Status.RESOURCE_EXHAUSTED,
        "the server has no memory for this call",
    )
