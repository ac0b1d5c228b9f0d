"""Kernels are interpreted on the CPU in these tests; what compiles them does so in a process of its own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def bfloat16_as_on_a_gpu():
    """Triton 3.9's interpreter multiplies the bits of bfloat16 matrices as integers, and truncates a float32 to
    bfloat16 where a GPU rounds to nearest."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply, convert = builder.create_dot, interpreter._convert_float

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    def rounded(x, source, target, mode):
        if (source.name, target.name) == ("fp32", "bf16"):
            return x.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(x, source, target, mode)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
