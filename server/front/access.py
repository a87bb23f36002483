"""Access control of both front doors: which RPC is of which group, and what becomes of a call that is refused.

`_native.transport.access.Judge` decides. Native calls meet it in the connection; all others here: the native door asks
before it runs a handler, grpc.aio through an interceptor. An RPC of no group is refused as soon as there are rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from _native.transport.access import TRUSTED_CALLER, Judge
from server.errors import Denied, Status
from server.front.lobby import Place
from server.front.tokens import Entry, TokenFile, TokenFileError
from server.rpc.call import Metadata
from server.rpc.service import GROUP_OF

log = logging.getLogger("inferd.access")

LOOK_EVERY = 1.0
"""Seconds between two looks at the file of tokens."""

Restriction = tuple[Sequence[str], str, str]
"""RPC groups, and the header's name and value that their calls need."""


class Access:
    """The rules of a server. Used on the event loop only.

    Args:
        restrictions: Triton's restricted protocols.
        token_file: tokens of callers; None: callers need none.
        triton_codes: refuse with UNAVAILABLE, as Triton does.

    Raises:
        TokenFileError: the file cannot be read, or is wrong.
    """

    def __init__(
        self, restrictions: Sequence[Restriction] = (), token_file: Path | None = None, *, triton_codes: bool = False
    ) -> None:
        self.judge = Judge(restrictions, triton_codes=triton_codes)
        self._file = TokenFile(token_file) if token_file is not None else None
        self._unclassified = Status.UNAVAILABLE if triton_codes else Status.PERMISSION_DENIED
        if self._file is not None:
            self._take(self._file.changed() or ())

    def _take(self, entries: Sequence[Entry]) -> None:
        self.judge.set_tokens([(entry.token, entry.groups, entry.models) for entry in entries])

    async def watch(self) -> None:
        """Read the file of tokens again whenever it changes; one that is wrong leaves the old tokens in force."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY)
            try:
                entries = await asyncio.to_thread(self._file.changed)
            except TokenFileError as error:
                log.error("the tokens stay as they were: %s", error)
                continue
            if entries is not None:
                self._take(entries)
                log.info("read %d tokens", sum(bool(entry.token) for entry in entries))

    def caller(self, path: str, metadata: Metadata, place: Place | None = None) -> int:
        """Who makes this call, for `require_model`.

        Args:
            path: the method.
            metadata: of the call.
            place: where it came in; None when that is not known.

        Raises:
            Denied: the call may not be made.
        """
        group = GROUP_OF.get(path)
        if group is None:
            raise Denied(self._unclassified, "this method belongs to no group that may be called")
        if place is not None and place.groups is not None and group not in place.groups:
            raise Denied(Status.UNIMPLEMENTED, f"{group} calls are not served at this address")
        if place is not None and place.trusted:
            return TRUSTED_CALLER
        status, text, caller = self.judge.judge(group, metadata)
        if status:
            raise Denied(Status(status), text)
        return caller

    def require_model(self, caller: int, model: str) -> None:
        """Raises `Denied` unless the caller may use the model."""
        status, text = self.judge.judge_model(caller, model)
        if status:
            raise Denied(Status(status), text)
