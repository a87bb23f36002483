"""Models come and go: what is loaded and unloaded, when, in which order, and what it replaces."""
