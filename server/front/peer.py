"""The client at the other end of a connection of the native front door."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inferd._native.transport.tls import TlsSession
from inferd.server.rpc.call import PeerCredentials

AuthContext = Mapping[str, Sequence[bytes]]

COMMON_NAME = "x509_common_name"
ALTERNATIVE_NAME = "x509_subject_alternative_name"
CERTIFICATE = "x509_pem_cert"
SUBJECT = "x509_subject"
ALTERNATIVE_NAMES = {"DNS": "x509_dns", "URI": "x509_uri", "email": "x509_email", "IP Address": "x509_ip"}
"""The types of alternative names, and the keys under which gRPC's C core has those of each type."""
_NAMES = (SUBJECT, COMMON_NAME, ALTERNATIVE_NAME, *ALTERNATIVE_NAMES.values(), *map("x509_".__add__, (
    "DirName", "Registered ID", "othername", "other")))  # fmt: skip
"""The keys of the names that identify a certificate's owner, by their types: `DNS:x` and `URI:x` are two owners."""
UNREADABLE = "<unsupported>"
"""An alternative name that cannot be read, as Python's ssl writes it."""

_KEY = os.urandom(16)
_UCRED = struct.Struct("=iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """The facts about a connected client."""

    address: str  # as gRPC writes it: "ipv4:127.0.0.1:4711", "unix:"
    credentials: PeerCredentials | None = None  # of a process on a unix socket
    auth: AuthContext = field(default_factory=dict)  # of a TLS client; keys and values are grpc's
    identity: int = 0  # see `identity_of`
    number: int = field(default_factory=itertools.count(1).__next__)
    departed: list[Callable[[], None]] = field(default_factory=list)  # called when the connection has ended


def peer_of(connection: socket.socket, name: Any) -> Peer:
    """The client behind an accepted socket, before any handshake.

    Args:
        name: its address, as `accept` gives it.
    """
    if connection.family == socket.AF_UNIX:
        address = f"unix:{name}" if isinstance(name, str) and name else "unix:"
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        credentials = PeerCredentials(*_UCRED.unpack(raw))
        return Peer(address, credentials, identity=identity_of({}, credentials.uid))
    return Peer(f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}")


def identified(peer: Peer, tls: TlsSession) -> Peer:
    """The client with the results of the handshake of TLS."""
    der, subject, names = tls.certificate(), tls.subject(), tls.alternative_names()
    auth = _auth(der, subject, names)
    return replace(peer, auth=auth, identity=identity_of({**auth, **_owner(der, subject, names)}))


def process_of(context: Any) -> PeerCredentials | None:
    """The client's process, from a call's context; None with grpc.aio."""
    return getattr(context, "peer_credentials", None)


_Names = list[tuple[str, str]]
_AlternativeNames = list[tuple[str, str | None]]


def _owner(der: bytes | None, subject: _Names, names: _AlternativeNames) -> dict[str, list[bytes]]:
    """The names of the certificate's owner by `_NAMES`, which are more than gRPC's context has: the whole subject, and
    the alternative names by their types. If a name cannot be read, also the certificate itself."""
    found = {SUBJECT: [f"{key}={value}".encode() for key, value in subject]}
    for kind, text in names:
        key = ALTERNATIVE_NAMES.get(kind, f"x509_{kind}")
        found.setdefault(key if key in _NAMES else "x509_other", []).append(f"{kind}:{text or UNREADABLE}".encode())
        if text is None:
            found.setdefault("x509_other", []).append(der or b"")
    return found


def _auth(der: bytes | None, subject: _Names, names: _AlternativeNames) -> AuthContext:
    found: dict[str, list[bytes]] = {
        "transport_security_type": [b"ssl"],
        "security_level": [b"TSI_PRIVACY_AND_INTEGRITY"],
    }
    if der is None:
        return found
    for key, value in subject:
        if key == "commonName":
            found.setdefault(COMMON_NAME, []).append(value.encode())
    if names:
        found[ALTERNATIVE_NAME] = [(text or UNREADABLE).encode() for _, text in names]
    found[CERTIFICATE] = [ssl.DER_cert_to_PEM_cert(der).encode()]
    return found


def identity_key(auth: AuthContext) -> str | None:
    """The key of `auth` that identifies the client: the alternative names before the common name, as in grpc."""
    return next((key for key in (ALTERNATIVE_NAME, COMMON_NAME) if key in auth), None)


def identity_of(auth: AuthContext, user: int | None = None) -> int:
    """A number for the client's identity, the same on all its connections; 0 if unknown.

    All certificates with the same subject and alternative names have the same number, so one may replace another. A
    certificate without these names has its own number.

    Args:
        auth: of a TLS client.
        user: of the client's process; None if the kernel does not report it.
    """
    names = [part for key in _NAMES if auth.get(key) for part in (key.encode(), *auth[key])]
    if names or CERTIFICATE in auth:
        return _number(b"certificate", *(names or auth[CERTIFICATE]))
    return 0 if user is None else _number(b"user", b"%d" % user)


def _number(*parts: bytes) -> int:
    """64 bits that no client can predict; not 0."""
    digest = hashlib.blake2b(key=_KEY, digest_size=8)
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return int.from_bytes(digest.digest()) or 1
