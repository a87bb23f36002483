"""Models of other frameworks, as programs for the workers of the Python backend.

A worker runs one of these files where a user's model has its `model.py`, in any interpreter that has the framework:
they import only each other, nothing of the server.
"""
