"""TLS of a simulation: certificates, the clients' side of it, and peers that nobody lets in.

OpenSSL is the real one. The numbers that it draws are the seed's (`world.c`), so that the same bytes come again.
"""

from __future__ import annotations

import functools
import os
import shutil
import ssl
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.tls import Credentials
from tests.front.certificates import Authority, Pair
from tests.simulation.sockets import OPEN
from tests.simulation.wire import PREFACE, Violation
from tests.simulation.world import BUILT, MS

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SHARE = 0.2  # of simulations whose clients use TLS
LONGEST = 20 * 86_400  # seconds for which certificates are used
PATIENCE = 12_000 * MS  # in which the server ends a connection that it does not let in
HANDSHAKE = 9_000 * MS  # that one may take, at least
NAMES = (
    "DNS:client.example",
    "URI:spiffe://example/client",
    "email:client@example.com",
    "IP:10.1.2.3",
    "IP:2001:db8::1",
    "RID:1.2.3.4",
    "otherName:1.2.3.4;UTF8:other",
)
SORTS = ("plain", "no protocol", "another protocol", "silent", "half", "garbage", "half a record")
STRANGERS = ("nobody", "stranger")  # where clients need certificates


@functools.cache
def certificates() -> tuple[Path, Pair, Pair, Pair]:
    """The root, and certificates of the server, of clients, and of a stranger; made once for many simulations."""
    folder = BUILT / f"tls-{int(time.time()) // LONGEST}"
    if not folder.exists():
        unfinished = folder.with_suffix(f".{os.getpid()}")
        authority = Authority(unfinished)
        authority.issue("server", "DNS:localhost")
        authority.issue("client", *NAMES, organisation="Simulated")
        Authority(unfinished / "other", "another root").issue("stranger")
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    pairs = [Pair(folder / f"{name}.pem", folder / f"{name}.key") for name in ("server", "client", "other/stranger")]
    return folder / "root.pem", *pairs  # type: ignore[return-value]


class Secure:
    """The TLS of a simulation.

    Attributes:
        on: clients have it.
        mutual: they show certificates.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._random = random = Random(f"{simulation.outcome.seed} tls")
        self.on = simulation.has("tls", SHARE, when=simulation.scale.tls and not simulation.scale.crowd)
        self.mutual = self.on and random.random() < 0.5
        self._contexts: dict[tuple[object, ...], ssl.SSLContext] = {}

    def policy(self) -> ListenPolicy:
        """How the door listens."""
        if not self.on:
            return ListenPolicy()
        root, server, *_ = certificates()
        return ListenPolicy(credentials=Credentials(server.certificate, server.key, root if self.mutual else None))

    def cipher(self) -> Cipher | None:
        """The client's side of a connection; None: it is not encrypted."""
        if not self.on:
            return None
        return Cipher(self.context(old=self._random.random() < 0.3))

    def context(
        self, *, old: bool = False, protocols: tuple[str, ...] = ("h2",), shown: int | None = 2
    ) -> ssl.SSLContext:
        """How a peer speaks TLS: with version 1.2 if it is `old`, and with the certificate at this place."""
        if (old, protocols, shown) not in self._contexts:
            self._contexts[old, protocols, shown] = self._make(old, protocols, shown)
        return self._contexts[old, protocols, shown]

    def _make(self, old: bool, protocols: tuple[str, ...], shown: int | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(certificates()[0])
        if old:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        if protocols:
            context.set_alpn_protocols(list(protocols))
        if self.mutual and shown is not None:
            pair = certificates()[shown]
            assert isinstance(pair, Pair)
            context.load_cert_chain(pair.certificate, pair.key)
        return context


class Cipher:
    """A client's side of TLS, between what it says and the bytes of its socket.

    Attributes:
        ready: the handshake is over, as far as the client knows.
        over: the server has said that nothing more comes.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self.ready = self.over = False
        self._shake()

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
            self.ready = True
        except ssl.SSLWantReadError:
            pass

    def said(self) -> bytes:
        """The bytes for the server so far."""
        return self._outgoing.read()

    def seal(self, data: bytes) -> bytes:
        """The bytes that say this, when it is ready."""
        done = 0
        while done < len(data):
            done += self._tls.write(memoryview(data)[done:])
        return self.said()

    def open(self, data: bytes) -> bytes:
        """Take bytes of the server; what they say.

        Raises:
            ssl.SSLError: the server refuses the client, or these are no records.
        """
        self._incoming.write(data)
        if not self.ready:
            self._shake()
        parts = []
        while self.ready and not self.over:
            try:
                part = self._tls.read(1 << 20)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                part = b""
            self.over = not part
            parts.append(part)
        return b"".join(parts)


class Intruder:
    """A peer that is not to be served: it does not speak TLS, or nothing else, or shows no certificate of ours.

    Args:
        simulation: whose door it comes to.
        number: for the story.
    """

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self._random = random = Random(f"{simulation.outcome.seed} intruder {number}")
        secure = simulation.secure
        self.sort = random.choice(SORTS + STRANGERS * 2 if secure.mutual else SORTS)
        self._name = f"intruder {number}"
        self._end = simulation.sockets.connect(self, number, random, roomy=True)
        self._cipher: Cipher | None = None
        self._out = b""
        simulation.tell(self._name, f"connects: {self.sort}")
        if self.sort == "plain":
            self._out = PREFACE
        elif self.sort != "silent":
            protocols = {"no protocol": (), "another protocol": ("http/1.1",)}.get(self.sort, ("h2",))
            shown = {"nobody": None, "stranger": 3}.get(self.sort, 2)
            self._cipher = Cipher(secure.context(protocols=protocols, shown=shown, old=random.random() < 0.3))
            self._out = self._cipher.said()
            if self.sort == "half":
                self._out = self._out[: random.randrange(1, len(self._out))]
        # it waits for the server to end the connection, or leaves before
        self._leaves = self.sort in ("silent", "half", "half a record") and random.random() < 0.7
        self._send()
        simulation.later(random.randint(0, 20 * MS) if self._leaves else PATIENCE, self._look)

    def _send(self) -> None:
        if self._end.peer is not None and self._out:
            size = self._end.send(self._out[: self._random.randint(1, len(self._out))])
            self._out = self._out[size:]
            if self._out and size:
                self._simulation.later(self._random.randint(0, MS), self._send)

    def heard(self) -> None:
        """See `sockets.Peer`."""
        if self._end.seen != OPEN:
            self._leave()
        elif self._cipher is not None and self._end.untaken:
            self._take(self._cipher)

    def _take(self, cipher: Cipher) -> None:
        was_ready = cipher.ready
        try:
            cipher.open(self._end.take(1 << 20))
        except ssl.SSLError:
            return  # it is refused
        self._out += cipher.said()
        if cipher.ready and not was_ready:
            if self.sort == "garbage":
                self._out += cipher.seal(PREFACE) + b"no record at all"
            elif self.sort == "half a record":
                self._out += cipher.seal(PREFACE)[:-3]
        self._send()

    def _look(self) -> None:
        """It has waited long enough."""
        simulation = self._simulation
        if self._end.peer is None:
            return
        if not self._leaves and not (simulation.is_faulty or simulation.stood_ns):
            raise Violation(f"{self._name}: {self.sort}, and the server does not end its connection")
        self._leave()

    def _leave(self) -> None:
        if self._end.peer is not None:
            self._simulation.tell(self._name, "leaves")
            self._end.part(reset=self._random.random() < 0.5)
