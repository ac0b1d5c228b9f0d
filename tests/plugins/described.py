"""Launch a kernel by its description alone, as TensorRT does: its arguments, its constants, its grid."""

from __future__ import annotations

import torch

from dflash_trt.plugins.kernels.spec import Kernel
from dflash_trt.plugins.tensorrt.expressions import evaluate


def launch(kernel: Kernel, sizes: dict[str, int], **tensors: torch.Tensor) -> None:
    """`tensors`: inputs and outputs by the names of the arguments."""
    for argument in kernel.arguments:
        if argument.pointer:
            want = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
            want |= {"*i64": torch.int64, "*i32": torch.int32}
            assert tensors[argument.name].dtype == want[argument.type], argument
    numbers = {a.name: evaluate(a.value or a.name, sizes) for a in kernel.numbers}
    grid = tuple(evaluate(text, sizes) for text in kernel.grid)
    kernel.function[grid](**tensors, **numbers, **kernel.constants)
