"""The instances of a version: their threads, the GPUs, cores and resources that they share, their warm-up."""
