"""A request and its responses, the lane that it enters, the bridge by which it returns to the event loop; what a
version accepts (its signature) and counts (its statistics)."""
