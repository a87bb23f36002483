"""The whole native server in one process, one thread at a time and virtual time, driven by one seed."""
