"""The path of the CUDA driver, set when the worker is configured; `device` loads it when it is needed."""

library = "libcuda.so.1"
