"""A request from its message to its answers: validation, submission, the way back to the event loop."""
