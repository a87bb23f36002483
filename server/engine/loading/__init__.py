"""Loads and unloads of models: which, when, in which order, and what they replace."""
