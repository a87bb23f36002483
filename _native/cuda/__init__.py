"""CUDA through the driver alone: nothing of it is needed to build, to import or to run without a GPU.

`driver` finds the driver's library and its functions, `device` has its objects (devices, streams, events, graphs) for
Python, `memory` the pools of page-locked and of device memory, `region` the device memory that clients share.
"""
