"""Plugins, which see and change the headers of each request."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Request:
    """The part of a request that a plugin sees.

    Attributes:
        headers: by name; the plugin may change them.
    """

    def __init__(self, headers: Mapping[str, Any] | None) -> None:
        self.headers: dict[str, Any] = dict(headers) if headers is not None else {}


class InferenceServerClientPlugin(ABC):
    """Base of plugins."""

    @abstractmethod
    def __call__(self, request: Request) -> None:
        """Called before each request is sent."""


class BasicAuth(InferenceServerClientPlugin):
    """Adds the user's name and password to each request.

    Args:
        username, password: in ASCII.
    """

    def __init__(self, username: str, password: str) -> None:
        said = base64.b64encode(f"{username}:{password}".encode("ascii")).decode("ascii")
        self._said = f"Basic {said}"

    def __call__(self, request: Request) -> None:
        request.headers["authorization"] = self._said
