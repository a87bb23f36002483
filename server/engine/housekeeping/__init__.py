"""How the engine's own work is done beside requests: on threads, in slices, away from the garbage collector."""
