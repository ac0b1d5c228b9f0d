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
