"""Read and check checkpoints: configs as records, tensors as byte ranges. Nothing here loads weights unasked."""

from dflash_trt.checkpoint.card import describe_checkpoint
from dflash_trt.checkpoint.draft import read_draft
from dflash_trt.checkpoint.model import (
    Draft,
    DraftConfig,
    Experts,
    Pair,
    Quantization,
    Rope,
    StackConfig,
    Target,
    TargetConfig,
    TensorRef,
)
from dflash_trt.checkpoint.pair import pair
from dflash_trt.checkpoint.scan import NotFinite, scan
from dflash_trt.checkpoint.target import read_target
from dflash_trt.checkpoint.weights import load_tensor, read_header, read_tensors

__all__ = [
    "Draft",
    "DraftConfig",
    "Experts",
    "NotFinite",
    "Pair",
    "Quantization",
    "Rope",
    "StackConfig",
    "Target",
    "TargetConfig",
    "TensorRef",
    "describe_checkpoint",
    "load_tensor",
    "pair",
    "read_draft",
    "read_header",
    "read_target",
    "read_tensors",
    "scan",
]
