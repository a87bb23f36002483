"""Makes the parts of the server from its settings: the engine, the front door with its rules, the metrics."""
