"""`inferd health` checks a server's health. It imports little, because containers and scripts run it often."""

from __future__ import annotations

from inferd.server.errors import Misused, ServerError
from inferd.server.observe.escaping import visible
from inferd.server.tools.reach import Reach
from inferd_client._calling import fields_of
from inferd_client._channel import Channel
from inferd_client._native.messages import framed
from inferd_client.grpc._options import reached
from inferd_client.utils import InferenceServerException

CHECK = "/grpc.health.v1.Health/Check"
STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
"""grpc.health.v1.HealthCheckResponse.ServingStatus."""


class Unhealthy(ServerError):
    """The server does not serve, or does not answer; the text has the reason."""


def ask(reach: Reach, service: str) -> None:
    """Return when a service is SERVING.

    Args:
        service: a model, `MODEL/VERSION`, or empty for the server.

    Raises:
        Unhealthy: the service is not SERVING, or there is no response in time.
        CallFailed: a file of certificates cannot be read.
        Misused: the address is not valid.
    """
    try:
        target, options, headers = reached(reach.url, False, None, None, None, reach.tls(), None, None)
        head = headers.of(CHECK, reach.metadata)
    except InferenceServerException as error:
        raise Misused(f"--url, --header: {error.message()}") from None
    channel = Channel(target, options)
    try:
        answer = bytes(channel.unary(head, [framed(request_of(service))], reach.timeout))
    except InferenceServerException as error:
        status = str(error.status()).removeprefix("StatusCode.")
        raise Unhealthy(f"{reach.url}: {status}: {visible(str(error.message()))}") from None
    finally:
        channel.close()
    status = dict(fields_of(answer)).get(1, 0)
    if status != STATUSES.index("SERVING"):
        name = STATUSES[status] if status in range(len(STATUSES)) else str(status)
        what = f"'{service}'" if service else "the server"
        raise Unhealthy(f"{reach.url}: {what} is {name}")


def request_of(service: str) -> bytes:
    """A grpc.health.v1.HealthCheckRequest."""
    name = service.encode()
    size, left = bytearray(), len(name)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return b"\n" + bytes([*size, left]) + name
