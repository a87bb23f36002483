"""The engine's work beside requests: on threads, in slices, and out of the garbage collector's way."""
