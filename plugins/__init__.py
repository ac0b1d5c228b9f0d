"""Kernels and TensorRT plugins, installed as `dflash_trt.plugins`.

Empty on purpose so far: the step graph of dense targets is made of TensorRT's native layers alone.
"""
