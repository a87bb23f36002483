"""Instances on a GPU: batches in its memory, transfers that overlap with execution, graphs."""
