"""What models and the processes that they start import by name."""
