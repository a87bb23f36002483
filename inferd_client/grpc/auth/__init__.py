"""Plugins that authenticate the client."""

from inferd_client.grpc._plugins import BasicAuth

__all__ = ["BasicAuth"]
