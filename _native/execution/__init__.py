"""Instances: threads that take batches, gather inputs, run a model and hand outputs over."""
