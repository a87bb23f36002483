"""The engine's own work beside requests: on threads, in slices, and without the garbage collector."""
