"""The worker side of the Python backend: runs in any Python from 3.9 on, with nothing but numpy installed."""
