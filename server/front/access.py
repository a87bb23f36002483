"""Access control of both front doors: who may make a call, and the log of refused calls.

`inferd._native.service.authorizer.Authorizer` decides. The connection asks it about native calls. About calls that
Python handles, the native front door asks this module before it runs a handler; for grpc.aio an interceptor does. If
there are rules, an RPC without a group is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from inferd._native.service.authorizer import TRUSTED_CALLER, Authorizer
from inferd.server.errors import Denied, Status
from inferd.server.front.connection_limits import ListenerPolicy
from inferd.server.front.tokens import TokenFile, TokenFileError
from inferd.server.rpc.call import Metadata, PeerCredentials
from inferd.server.rpc.service import GROUP_OF

log = logging.getLogger("inferd.access")

LOOK_EVERY = 0.5
"""Seconds between two looks at the file of tokens, and between two rounds of log lines."""

Restriction = tuple[Sequence[str], str, str]
"""RPC groups, and the header's name and value that their calls need."""


class Access:
    """The rules of a server. Used on the event loop only.

    Attributes:
        guards: whether there are rules; without rules every call is let in.

    Args:
        restrictions: Triton's restricted protocols.
        token_file: tokens of callers; None: callers need none.
        overrides: whether a load may bring a configuration and files if callers need no token.

    Raises:
        TokenFileError: the file cannot be read, or is wrong.
    """

    def __init__(
        self,
        restrictions: Sequence[Restriction] = (),
        token_file: Path | None = None,
        *,
        overrides: bool = False,
    ) -> None:
        self.authorizer = Authorizer(restrictions, overrides=overrides)
        self._file = TokenFile(token_file, self.authorizer.key) if token_file is not None else None
        self._watchers: list[Callable[[], None]] = []
        self.guards = bool(restrictions) or token_file is not None
        if self._file is not None:
            self.authorizer.set_tokens(self._file.first())

    async def watch(self) -> None:
        """Log refusals soon after they happen, and read the file of tokens again if it has changed; never returns.

        A file that is wrong leaves the old tokens in force.
        """
        noted = asyncio.Event()
        noted.set()  # a call may have been refused
        self.authorizer.on_note = noted.set
        try:
            while True:
                if self._file is None:
                    await noted.wait()
                await asyncio.sleep(LOOK_EVERY)
                noted.clear()
                self._tell()
                if self._file is not None:
                    await self._read(self._file)
        finally:
            self._tell()

    async def _read(self, file: TokenFile) -> None:
        try:
            table = await asyncio.to_thread(file.changed)
        except TokenFileError as error:
            log.error("the tokens stay as they were: %s", error)
            return
        except Exception:  # such as a lack of memory: the next look may succeed
            log.exception("the tokens stay as they were")
            return
        if table is not None:
            self.authorizer.set_tokens(table)
            for watcher in self._watchers:
                watcher()
            log.info("read %d tokens", len(table))

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """Register `watcher`, called whenever tokens or their rights have changed."""
        self._watchers.append(watcher)

    # -- judging --

    def caller(self, path: str, metadata: Metadata, listener_policy: ListenerPolicy | None = None) -> int:
        """The caller of this call, for `require`.

        Args:
            path: the method.
            metadata: of the call.
            listener_policy: of the call's listener; None if unknown.

        Raises:
            Denied: the call may not be made.
        """
        group = self._group(path)
        if listener_policy is not None and listener_policy.groups is not None and group not in listener_policy.groups:
            raise Denied(Status.UNIMPLEMENTED, f"{group} calls are not served at this address")
        if listener_policy is not None and listener_policy.trusted:
            return TRUSTED_CALLER
        status, text, refusal, caller = self.authorizer.authorize(group, metadata)
        _deny_unless_ok(status, text, refusal)
        return caller

    def require(self, caller: int, path: str, model: str = "") -> None:
        """Check the right to one message of an admitted call, by the rights that the caller's token has now.

        Args:
            caller: the result of `caller`.
            path: the method.
            model: that the message is about; "" for none.

        Raises:
            Denied: the caller may not call the method, or not for this model.
        """
        _deny_unless_ok(*self.authorizer.authorize_message(caller, self._group(path), model))

    def require_every_model(self, caller: int) -> None:
        """Raises `Denied` unless this caller may use every model."""
        _deny_unless_ok(*self.authorizer.authorize_every_model(caller))

    def require_overrides(self, caller: int) -> None:
        """Raises `Denied` unless a load of this caller may bring a configuration and files."""
        _deny_unless_ok(*self.authorizer.authorize_override(caller))

    def _group(self, path: str) -> str:
        group = GROUP_OF.get(path)
        if group is None:
            raise Denied(Status.PERMISSION_DENIED, "this method belongs to no group that may be called")
        return group

    # -- the log of refusals --

    def note(self, peer: str, path: str, error: BaseException, process: PeerCredentials | None = None) -> None:
        """Record a refused call for the log, unless `error` is not about rights.

        Args:
            peer: the client's address.
            path: the method.
            error: that ended the call.
            process: of the client, if the kernel reports it.
        """
        if isinstance(error, Denied):
            self.authorizer.note(peer, path, str(error), -1 if process is None else process.uid)

    def _tell(self) -> None:
        """Log the refusals since the last time: a line for each of the first ones, and one for all others."""
        notes, left_out = self.authorizer.take_notes()
        for (peer, path, text), count in notes.items():
            log.warning("refused: %s %s: %s%s", peer, path, text, f" ({count} times)" if count > 1 else "")
        if left_out:
            log.warning("refused: %d more calls, left out here", left_out)


def _deny_unless_ok(status: int, text: str, refusal: int) -> None:
    if status:
        raise Denied(Status(status), text, refusal)
