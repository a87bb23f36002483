"""Traces: what happened to single requests, in files or as spans."""
