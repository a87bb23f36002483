"""Identical requests: answered once while they run, and later from memory or a store outside."""
