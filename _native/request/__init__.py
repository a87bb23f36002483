"""A request and its responses, what a model accepts, statistics, timers, the way back to the event loop."""
