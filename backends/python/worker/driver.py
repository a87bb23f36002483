"""Which CUDA driver the process uses. It is told when the worker is configured; `device` loads it when it is needed."""

library = "libcuda.so.1"
