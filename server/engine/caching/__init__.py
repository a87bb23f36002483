"""The response cache outside of this process."""
