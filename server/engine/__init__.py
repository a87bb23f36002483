"""Everything between a decoded request and its response: models, configuration, lanes, instances."""
