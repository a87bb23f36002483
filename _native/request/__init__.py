"""A request and its responses, the lane that it enters, the bridge by which it returns to the front; the signature
of a version and its statistics."""
