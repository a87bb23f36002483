"""The loaded models, their versions and states, and how these are listed."""
