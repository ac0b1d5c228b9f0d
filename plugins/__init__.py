"""Kernels and TensorRT plugins, installed as `dflash_trt.plugins` (README.md). Importing it imports nothing else."""
