"""Guards blocking work beside the event loop: how many threads it takes."""

import threading

from inferd.server.engine.housekeeping import threads
from inferd.server.engine.housekeeping.threads import on_thread


async def test_work_that_follows_other_work_needs_no_other_thread(monkeypatch):
    """When the caller goes on, the thread that has done the work takes more: the load of many models makes few."""
    monkeypatch.setattr(threads, "IDLE_SECONDS", 20.0)
    assert len({await on_thread(threading.get_ident) for _ in range(500)}) == 1
