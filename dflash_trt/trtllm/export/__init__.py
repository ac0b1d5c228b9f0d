"""TensorRT-LLM checkpoints of a pair, for `trtllm-build`: what `dflash-trt export` writes."""

from dflash_trt.trtllm.export.instructions import Limits
from dflash_trt.trtllm.export.job import Exported, Network, export_pair

__all__ = ["Exported", "Limits", "Network", "export_pair"]
