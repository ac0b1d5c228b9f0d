"""The kernels as TensorRT plugins of namespace `dflash`. Importing this needs neither TensorRT nor Triton."""

from __future__ import annotations

from dflash_trt.plugins.tensorrt.launch import check_sm
from dflash_trt.plugins.tensorrt.ops import NAMESPACE, PLUGINS, Plugin
from dflash_trt.plugins.tensorrt.register import register

__all__ = ["NAMESPACE", "PLUGINS", "Plugin", "check_sm", "register"]
