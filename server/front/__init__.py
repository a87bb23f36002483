"""The front doors: transports that host the handlers of `inferd.server.rpc`."""
