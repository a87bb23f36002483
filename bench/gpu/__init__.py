"""Measurements that need a real GPU: `python -m bench.gpu [FILE]` writes them as JSON; without one it says so."""
