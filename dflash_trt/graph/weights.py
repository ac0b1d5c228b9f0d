"""Weights of a graph: references into the checkpoint's own safetensors files, never copies.

An ONNX initializer with external data is (file, offset, length), and a safetensors tensor is just such a range. Where
the checkpoint's dtype is not the graph's, a `Cast` follows, which the compilers fold at load or build time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import TensorRef, load_tensor
from dflash_trt.errors import UserError
from dflash_trt.graph.names import LINKS
from dflash_trt.graph.net import Net

DTYPES = {"F32": ir.DataType.FLOAT, "BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16}


class Weights:
    """The tensors of one checkpoint as values of one graph."""

    def __init__(self, net: Net, role: str, tensors: dict[str, TensorRef], prefix: str = ""):
        self.net, self.role, self.tensors, self.prefix = net, role, tensors, prefix

    def at(self, prefix: str) -> Weights:
        """The same checkpoint, with names read below `prefix`."""
        return Weights(self.net, self.role, self.tensors, self.prefix + prefix)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def raw(self, name: str) -> ir.Value:
        """The tensor in the checkpoint's dtype."""
        ref = self.tensors[self.prefix + name]
        if ref.dtype not in DTYPES:
            raise UserError(
                f"{ref.name} has dtype {ref.dtype}",
                where=ref.file,
                fix=f"supported weight dtypes: {', '.join(DTYPES)}",
            )
        return self._reference(ref, DTYPES[ref.dtype], ref.shape)

    def stored(self, name: str, dtype: ir.DataType, shape: Sequence[int] | None = None) -> ir.Value:
        """The tensor's bytes, read as values of another dtype and, if given, another shape."""
        ref = self.tensors[self.prefix + name]
        return self._reference(ref, dtype, tuple(shape or ref.shape))

    def _reference(self, ref: TensorRef, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        link = ref.file.name
        if ref.file.parent != self.net.beside:  # not written for this graph
            link = f"{LINKS}/{self.role}.{link}"
            self.net.links[link] = ref.file
        name = f"{self.role}.{ref.name.removeprefix(f'{self.role}.')}"
        return self.net.initializer(
            ir.ExternalTensor(link, ref.offset, ref.nbytes, dtype, shape=ir.Shape(shape), name=name)
        )

    def __call__(self, *names: str) -> ir.Value:
        """The tensor in the graph's dtype; several names are stacked along the first axis."""
        parts = [self.raw(name) for name in names]
        parts = [part if part.dtype == self.net.dtype else self.net.cast(part, self.net.dtype) for part in parts]
        return self.net.concat(parts, axis=0)

    def is_packed(self, module: str) -> bool:
        """Is the module's weight NVFP4?"""
        return f"{module}.weight_scale" in self

    def packed(self, module: str) -> tuple[ir.Value, ir.Value, ir.Value]:
        """An NVFP4 weight: codes, block scales [out, in/16], global scale [].

        The same bytes are FLOAT4E2M1 [out, in] for TensorRT, and UINT8 [out, in/2] where no kernel knows that type.
        """
        codes = self.tensors[f"{self.prefix}{module}.weight"]
        rows, pairs = codes.shape
        kind, shape = (
            (ir.DataType.FLOAT4E2M1, (rows, 2 * pairs)) if self.net.native else (ir.DataType.UINT8, codes.shape)
        )
        scales = self.tensors[f"{self.prefix}{module}.weight_scale"]
        return (
            self._reference(codes, kind, shape),
            self._reference(scales, ir.DataType.FLOAT8E4M3FN, scales.shape),
            self.net.const(self.number(f"{module}.weight_scale_2"), np.float32),
        )

    def input_scale(self, module: str) -> float | None:
        """Of the module's activations; None if they are not quantized."""
        return self.number(f"{module}.input_scale") if f"{module}.input_scale" in self else None

    def number(self, name: str) -> float:
        """The one number in a tensor, read now."""
        return float(load_tensor(self.tensors[self.prefix + name]).reshape(()))

    def bias(self, *names: str) -> ir.Value | None:
        """As calling, for biases that a checkpoint may not have."""
        return self(*names) if names[0] in self else None
