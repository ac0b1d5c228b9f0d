"""The drafter's context arena: what it takes of a GPU, and how large a batch fits.

TensorRT-LLM keeps the keys and values that the drafter makes of the target's hidden states in a buffer of its own, for
every slot and position that could be used, beside the KV cache and not counted by `free_gpu_memory_fraction`
(`_torch/speculative/dflash.py`; TensorRT-LLM issue 16005, PR 19466). It is allocated at the first forward:

* usually that is the one which measures how much memory is left for the KV cache. The arena then comes before the
  cache, which gets its fraction of what remains: nothing fails until next to nothing remains.
* where that measurement is skipped, the cache has taken its fraction already and the arena gets the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
OVERHEAD = 4 * GIB  # of a rank: CUDA, NCCL and libraries, as TensorRT-LLM PR 19466 reckons
RESERVE = 6 * GIB  # activations and CUDA graphs, likewise
SAFETY = 0.7  # of what is left beside a cache that came first: above it, warm-up failed in that PR's measurements
PAGE = 32  # positions, of the TRTLLM backend


@dataclass(frozen=True)
class Arena:
    """Sizes on one rank."""

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


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    card: int
    weights: int  # of the target and the drafter
    fraction: float  # free_gpu_memory_fraction
    cache_first: bool = False  # the KV cache is allocated before the arena

    @property
    def free(self) -> int:
        """What weights and libraries leave."""
        return max(0, self.card - self.weights - OVERHEAD)

    @property
    def share(self) -> float:
        """The fraction, where it is one: DF025 speaks of others."""
        return min(1.0, max(0.0, self.fraction))

    @property
    def room(self) -> int:
        """What the arena may take.

        Where it comes first, half of what is free: places for more tokens than the rest could ever hold are wasted,
        for the target, with more layers than the drafter, needs more bytes for each of them.
        """
        if self.cache_first:
            return int(self.free * (1 - self.share) * SAFETY)
        return max(0, min(self.free - RESERVE, self.free // 2))

    def cache(self, arena: int) -> int:
        """What the target's KV cache gets beside an arena of that size."""
        return int(max(0, self.free - (0 if self.cache_first else arena)) * self.share)


def rank_heads(heads: int, ranks: int) -> int:
    """Key/value heads of one rank; beyond one head a rank they are repeated."""
    return max(1, -(-heads // ranks))
