"""The front doors: transports that host the handlers of `server.rpc`."""
