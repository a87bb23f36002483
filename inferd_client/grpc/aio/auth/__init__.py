"""Plugins that say who asks."""

from inferd_client.grpc._plugins import BasicAuth

__all__ = ["BasicAuth"]
