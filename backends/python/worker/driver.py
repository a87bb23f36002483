"""Path or name of the CUDA driver's library; the worker's configuration sets it, `device` loads it at first use."""

library = "libcuda.so.1"
