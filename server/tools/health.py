"""`inferd health`: asks a server whether it serves, for containers and scripts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.errors import ServerError

SERVING = health_pb2.HealthCheckResponse.SERVING


class Unhealthy(ServerError):
    """The server does not serve, or cannot be asked; the text says why."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Which server is asked, for what, and how it is reached.

    Attributes:
        url: HOST:PORT or unix:PATH.
        service: a model, `MODEL/VERSION`, or empty for the server.
        timeout: seconds.
        root_cert: PEM file that the server's certificate is checked against; None: plain text.
        headers: further metadata, such as the key of a restricted protocol or a token.
    """

    url: str
    service: str = ""
    timeout: float = 2.0
    root_cert: Path | None = None
    headers: tuple[tuple[str, str], ...] = ()


def ask(check: HealthCheck) -> None:
    """Return when `check.service` is SERVING.

    Raises:
        Unhealthy: it is not, or there is no answer in time.
    """
    credentials = None
    if check.root_cert is not None:
        try:
            credentials = grpc.ssl_channel_credentials(check.root_cert.read_bytes())
        except OSError as error:
            raise Unhealthy(f"--root-cert: {check.root_cert}: {error.strerror}") from None
    what = f"'{check.service}'" if check.service else "the server"
    with grpc.secure_channel(check.url, credentials) if credentials else grpc.insecure_channel(check.url) as channel:
        request = health_pb2.HealthCheckRequest(service=check.service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=check.timeout, metadata=check.headers)
        except grpc.RpcError as error:
            raise Unhealthy(f"{check.url}: {error.code().name}: {error.details()}") from None
    if answer.status != SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise Unhealthy(f"{check.url}: {what} is {name}")
