"""Lanes of ensembles: graphs of other models."""
