"""The arguments that both clients take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inferd_client._balancing import PICK_FIRST, POLICIES
from inferd_client._calling import Headers
from inferd_client._connecting import Options, Target, target_of, tls_context
from inferd_client.utils import InferenceServerException

INT32_MAX = 2**31 - 1
MAX_GRPC_MESSAGE_SIZE = INT32_MAX


class KeepAliveOptions:
    """When the client sends PINGs, to find out whether the server still responds.

    Args:
        keepalive_time_ms: milliseconds without a byte from the server until a PING.
        keepalive_timeout_ms: milliseconds to wait for the answer to a PING; then the connection is closed.
        keepalive_permit_without_calls: send PINGs also while no call is in flight.
        http2_max_pings_without_data: not used, because PINGs are sent only while nothing else comes.
    """

    def __init__(
        self,
        keepalive_time_ms: int = INT32_MAX,
        keepalive_timeout_ms: int = 20000,
        keepalive_permit_without_calls: bool = False,
        http2_max_pings_without_data: int = 2,
    ) -> None:
        self.keepalive_time_ms = keepalive_time_ms
        self.keepalive_timeout_ms = keepalive_timeout_ms
        self.keepalive_permit_without_calls = keepalive_permit_without_calls
        self.http2_max_pings_without_data = http2_max_pings_without_data


def reached(
    url: str,
    ssl: bool,
    root_certificates: str | None,
    private_key: str | None,
    certificate_chain: str | None,
    creds: Any,
    keepalive_options: KeepAliveOptions | None,
    channel_args: Iterable[tuple[str, Any]] | None,
) -> tuple[Target, Options, Headers]:
    """The target, connection options and headers from a client's arguments.

    Raises:
        InferenceServerException: an argument is wrong.
        OSError: a file cannot be read.
    """
    try:
        target = target_of(url)
    except ValueError as error:
        raise InferenceServerException(str(error)) from None
    if creds is not None and not hasattr(creds, "wrap_bio"):
        raise InferenceServerException(
            f"creds: expected an ssl.SSLContext, got {type(creds).__name__}: no other package can read credentials of "
            "grpcio; use ssl=True with root_certificates, private_key and certificate_chain"
        )
    if ssl and creds is None and private_key is not None and certificate_chain is None:
        raise InferenceServerException("private_key: expected a certificate_chain, too, got none")
    options = Options()
    if creds is not None:
        options.context = creds
        options.context.set_alpn_protocols(["h2"])
    elif ssl:
        options.context = tls_context(root_certificates, private_key, certificate_chain)
    alive = keepalive_options or KeepAliveOptions()
    said = dict(channel_args) if channel_args is not None else {}
    time_ms = said.get("grpc.keepalive_time_ms", alive.keepalive_time_ms)
    if time_ms < INT32_MAX:
        options.keepalive = (
            time_ms / 1000,
            said.get("grpc.keepalive_timeout_ms", alive.keepalive_timeout_ms) / 1000,
            bool(said.get("grpc.keepalive_permit_without_calls", alive.keepalive_permit_without_calls)),
        )
    limit = said.get("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_SIZE)
    options.limit = limit if limit >= 0 else MAX_GRPC_MESSAGE_SIZE
    busy_us = said.get("inferd.busy_poll_us", 0)
    if busy_us < 0:
        raise InferenceServerException(f"inferd.busy_poll_us: expected 0 or more microseconds, got {busy_us}")
    options.busy_poll = busy_us / 1e6
    options.server_name = said.get("grpc.ssl_target_name_override", "")
    authority = said.get("grpc.default_authority") or options.server_name or target.authority
    agent = said.get("grpc.primary_user_agent")
    headers = Headers(
        authority, secure=options.context is not None, user_agent=f"{agent} inferd-client" if agent else "inferd-client"
    )
    return target, options, headers


def checked(connections: int) -> int:
    """The number of connections that a client was given.

    Raises:
        InferenceServerException: the number is less than 1.
    """
    if connections < 1:
        raise InferenceServerException(f"connections: expected 1 or more, got {connections}")
    return connections


def policy_of(given: str | None, channel_args: Iterable[tuple[str, Any]] | None) -> str:
    """The policy of load balancing: `given`, else that of grpc.lb_policy_name, else that of grpc.service_config.

    Raises:
        InferenceServerException: there is no such policy.
    """
    said = dict(channel_args) if channel_args is not None else {}
    if given is None:
        given = said.get("grpc.lb_policy_name")
    if given is None and (config := said.get("grpc.service_config")):
        given = _policy_in(config)
    if given is None:
        return PICK_FIRST
    if given not in POLICIES:
        raise InferenceServerException(f"load_balancing: expected {' or '.join(POLICIES)}, got {given!r}")
    return given


def _policy_in(config: str) -> str | None:
    """The policy of a gRPC service config: the first in its list that the client knows."""
    import json

    try:
        found = json.loads(config)
        names = [name for each in found.get("loadBalancingConfig", []) for name in each]
    except (AttributeError, TypeError, ValueError) as error:
        raise InferenceServerException(f"grpc.service_config: {error}") from None
    policy = found.get("loadBalancingPolicy")
    if policy is not None:
        names.append(str(policy).lower())
    return next((name for name in names if name in POLICIES), None)
