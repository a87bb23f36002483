"""Stand-ins for what cannot be had on a machine without a GPU."""
