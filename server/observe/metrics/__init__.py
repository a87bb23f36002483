"""Metrics of the server, as text for Prometheus."""
