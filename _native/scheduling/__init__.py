"""Lanes: how requests meet a model, and the queue of models without state."""
