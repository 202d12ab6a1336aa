"""Triton kernels for CUDA devices: what decoding and scoring would else do in many launches, or in more memory.

`dispatch` says whether a call is served; callers keep PyTorch's own path for all that is not. Modules under `jit` hold
the code that runs on the device, the modules here what allocates, chooses blocks and launches.
"""
