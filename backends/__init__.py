"""Backends: each turns model files of one format into instances that execute batches."""
