"""Metrics: what the server has done and does, as text for Prometheus."""
