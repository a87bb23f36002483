"""Lanes of models with state: requests that belong together."""
