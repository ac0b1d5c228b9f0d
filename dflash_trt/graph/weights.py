"""Weights of a graph: references into the checkpoint's own safetensors files, never copies.

An ONNX initializer with external data is (file, offset, length), and a safetensors tensor is just such a range. Where
the checkpoint's dtype is not the graph's, a `Cast` follows, which the compilers fold at load or build time.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.checkpoint import TensorRef
from dflash_trt.errors import UserError
from dflash_trt.graph.net import Net

LINKS = "weights"  # folder of the engine directory that holds one link per checkpoint file

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
        link = f"{LINKS}/{self.role}.{ref.file.name}"
        self.net.links[link] = ref.file
        return self.net.initializer(
            ir.ExternalTensor(
                link,
                ref.offset,
                ref.nbytes,
                DTYPES[ref.dtype],
                shape=ir.Shape(ref.shape),
                name=f"{self.role}.{ref.name}",
            )
        )

    def __call__(self, *names: str) -> ir.Value:
        """The tensor in the graph's dtype; several names are stacked along the first axis."""
        parts = [self.raw(name) for name in names]
        parts = [part if part.dtype == self.net.dtype else self.net.cast(part, self.net.dtype) for part in parts]
        return self.net.concat(parts, axis=0)

    def bias(self, *names: str) -> ir.Value | None:
        """As calling, for biases that a checkpoint may not have."""
        return self(*names) if names[0] in self else None
