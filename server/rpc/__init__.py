"""Handlers of the RPCs, free of any transport: `service.table` lists them, a front door hosts them."""
