"""The server that clients are tested with, for the commands that ask one."""

from tests.client.conftest import models, server

__all__ = ["models", "server"]
