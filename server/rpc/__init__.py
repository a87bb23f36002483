"""Handlers of the RPCs, independent of the transport: `service.table` lists them, a front door registers them."""
