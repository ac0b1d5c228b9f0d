"""What keys and values take of a rank: the widths they are stored in, its heads, and the drafter's context arena."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a number with its scales: MXFP4 has one byte for 32 numbers, NVFP4 one for 16.
WIDTHS = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
CACHE_WIDTHS = {dtype: WIDTHS[dtype] for dtype in ("bf16", "fp8", "nvfp4")}
PAGE = 32  # positions, of TensorRT-LLM's drafter attention TRTLLM


def rank_heads(heads: int, ranks: int) -> int:
    """Key/value heads of one rank; beyond one head a rank they are repeated."""
    return max(1, -(-heads // ranks))


@dataclass(frozen=True)
class Arena:
    """The buffer in which TensorRT-LLM keeps what the drafter makes of the target's hidden states; sizes on one rank.

    There is a place for every slot and position that could be used (`_torch/speculative/dflash.py`).
    """

    layers: int
    positions: int  # the longest context
    width: int  # K + 1 positions more, for the block
    kv_heads: int  # of this rank
    head_dim: int
    page: int = 1  # positions are allocated by that many
    dtype_bytes: int = 2  # bfloat16, that of the drafter's `fc`, whatever the KV cache is stored in

    @property
    def position(self) -> int:
        """Bytes of one position: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def slot(self) -> int:
        """Bytes of one sequence."""
        return -(-(self.positions + self.width) // self.page) * self.page * self.position

    def size(self, batch: int) -> int:
        """Bytes for `batch` sequences; one slot more takes what pads a CUDA graph."""
        return (batch + 1) * self.slot

    def largest_batch(self, room: int) -> int:
        """How many sequences fit in `room` bytes; 0: not even one."""
        return max(0, room // self.slot - 1)

    def longest(self, room: int, batch: int) -> int:
        """Positions for which `batch` sequences fit in `room` bytes; 0 or less: there are none."""
        return room // (batch + 1) // self.position // self.page * self.page - self.width
