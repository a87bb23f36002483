"""Traces: the course of single requests, in files or as spans."""
