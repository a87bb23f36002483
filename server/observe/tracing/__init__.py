"""Traces: what happened to single requests, and where that is told."""
