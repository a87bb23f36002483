"""The modules that models and their processes import by name."""
