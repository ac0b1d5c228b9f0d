"""Memory of a GPU: the drafter's context arena, the weights, the KV cache that is left."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.kv import Arena
from dflash_trt.sizes import format_bytes
from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.arena import Memory
from dflash_trt.trtllm.deployment import ERROR, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.support import FIRST

FRACTION = ("kv_cache_config", "free_gpu_memory_fraction")
SEQUENCE = ("max_seq_len",)
BATCH = ("max_batch_size",)
FIRST_LIMIT = 8192  # positions of the arena in the first release
HIGH, LOW = 0.95, 0.3


@rule(
    "DF020",
    ERROR,
    "the drafter's context arena fits beside the weights and a KV cache",
    why="it is allocated for max_batch_size + 1 sequences of max_seq_len, outside free_gpu_memory_fraction: the server "
    "runs out of memory at its first step, or keeps a KV cache too small to admit requests",
    source="TensorRT-LLM issue 16005 (80 GB a rank) and PR 19466; our judgement: half of what is free is too much",
)
def arena_fits(deployment: Deployment) -> Iterator[Fault]:
    if not footprint.pooled(deployment.settings):
        yield from _oversized(deployment)


@rule(
    "DF021",
    WARNING,
    "with the TRTLLM backend, the arena would fit as well",
    why="the context is paged through the KV cache; where that cannot be, a private arena is made after all",
    source="TensorRT-LLM PR 19466 (warns) and PR 18343 (pages of the draft KV cache manager)",
)
def arena_would_fit(deployment: Deployment) -> Iterator[Fault]:
    if footprint.pooled(deployment.settings):
        yield from _oversized(deployment)


def _oversized(deployment: Deployment) -> Iterator[Fault]:
    settings, arena = deployment.settings, footprint.arena(deployment)
    if arena is None or (settings.sequence is None and footprint.pooled(settings)):
        return
    memory = footprint.memory(deployment)
    known = memory is not None
    memory = memory or Memory(deployment.gpus.card.memory, 0, settings.kv_fraction, footprint.cache_first(deployment))
    size = arena.size(settings.batch)
    if size <= memory.room:
        return
    card, left = deployment.gpus.card, memory.cache(size)
    weights = f"; weights leave {format_bytes(memory.free)}" if known else "; weights not counted"
    rest = f", the KV cache would get {format_bytes(left)}" if left and not memory.cache_first else ""
    what = (
        f"the drafter's context arena takes {format_bytes(size)} ({size / 1e9:,.1f} GB) of each {card.name} of "
        f"{format_bytes(card.memory)}{weights}{rest}: {_formula(deployment, arena)}"
    )
    yield Fault(what, _advice(deployment, arena, memory), SEQUENCE if deployment.has(*SEQUENCE) else BATCH)


def _formula(deployment: Deployment, arena: Arena) -> str:
    length = "max_seq_len" if arena.positions == deployment.settings.sequence else "positions"
    return (
        f"2 x {arena.layers} layers x ({deployment.settings.batch} max_batch_size + 1) x ({arena.positions} {length} + "
        f"{arena.width}) x {arena.kv_heads} KV heads x {arena.head_dim} x {arena.dtype_bytes} bytes"
    )


def _advice(deployment: Deployment, arena: Arena, memory: Memory) -> str:
    batch, fits = deployment.settings.batch, arena.largest_batch(memory.room)
    longest = arena.longest(memory.room, batch)
    advice = [f"at this max_seq_len a max_batch_size of {fits} fits, no more" if fits else "no batch fits"]
    if longest > 0:
        advice.append(f"at this max_batch_size a max_seq_len of {longest}")
    if memory.cache_first:
        advice.append("or lower free_gpu_memory_fraction")
    return "; ".join(advice)


@rule(
    "DF022",
    WARNING,
    "max_seq_len is set",
    why="it sizes the arena: unset, it is what the target could do at most, and TensorRT-LLM skips its own check",
    source="TensorRT-LLM PR 19466, issue 16005",
)
def sequence_is_set(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if settings.speculation is None or deployment.has(*SEQUENCE):
        return
    taken = footprint.sequence(deployment)
    comes = f", so that the target's {taken} counts" if taken else ""
    yield Fault(f"max_seq_len is not set{comes}", "write the longest prompt and answer you serve", SEQUENCE)


@rule(
    "DF023",
    WARNING,
    "max_seq_len is within what the drafter counts to",
    why="a longer request drafts nothing more; it goes on, token by token",
    source="_torch/speculative/dflash.py (context limit: max_position_embeddings of the drafter)",
)
def drafter_counts_that_far(deployment: Deployment) -> Iterator[Fault]:
    sequence, drafter = footprint.sequence(deployment), deployment.drafter.shape
    if sequence and drafter and drafter.max_position and sequence > drafter.max_position:
        what = f"max_seq_len {sequence} is longer than the drafter's max_position_embeddings {drafter.max_position}"
        yield Fault(what, f"write {drafter.max_position}, or expect no drafts beyond it", SEQUENCE)


@rule(
    "DF024",
    WARNING,
    f"contexts of more than {FIRST_LIMIT} tokens have a release that drafts for them",
    why=f"the first release stopped at {FIRST_LIMIT}: longer requests draft nothing",
    source="_torch/speculative/dflash.py as of PR 12794",
)
def release_drafts_that_far(deployment: Deployment) -> Iterator[Fault]:
    sequence = footprint.sequence(deployment)
    if deployment.release == FIRST and sequence and sequence > FIRST_LIMIT:
        what = f"max_seq_len is {sequence}, but DFlash of {FIRST} drafts up to {FIRST_LIMIT} tokens"
        yield Fault(what, "use a later release", SEQUENCE)


@rule(
    "DF025",
    WARNING,
    "free_gpu_memory_fraction is neither too high nor too low",
    why="activations, CUDA graphs and NCCL need the rest; what nobody takes serves nobody",
    source="kvcache.md of TensorRT-LLM (above 0, below 1); PR 19466 (2 to 4 GiB are taken later); our judgement: "
    f"{HIGH} and {LOW}",
)
def fraction_is_sensible(deployment: Deployment) -> Iterator[Fault]:
    fraction = deployment.settings.kv_fraction
    if not 0 < fraction <= 1:
        yield Fault(f"free_gpu_memory_fraction is {fraction:g}, not a share", "write 0.8 or so", FRACTION, ERROR)
    elif fraction > HIGH:
        yield Fault(f"free_gpu_memory_fraction {fraction:g} leaves next to nothing", "write 0.9 or less", FRACTION)
    elif fraction < LOW:
        what = f"free_gpu_memory_fraction {fraction:g} leaves most of the memory unused"
        yield Fault(what, "write 0.8 or so, if nothing else runs there", FRACTION)


@rule(
    "DF026",
    ERROR,
    "the KV cache holds a sequence of max_seq_len at least",
    why="a request longer than the cache is refused, or waits for ever",
    source="kvcache.md of TensorRT-LLM (free_gpu_memory_fraction, max_tokens); issue 16005 (admission starves)",
)
def cache_holds_a_sequence(deployment: Deployment) -> Iterator[Fault]:
    settings, tokens, memory = deployment.settings, footprint.sequence(deployment), footprint.memory(deployment)
    if not tokens:
        return
    if settings.kv_tokens is not None and settings.kv_tokens < tokens:
        what = f"kv_cache_config.max_tokens {settings.kv_tokens} is less than max_seq_len {tokens}"
        yield Fault(what, f"write {tokens} or more, or leave it out", ("kv_cache_config", "max_tokens"))
    sequence = footprint.cache_per_sequence(deployment, tokens)
    if memory is None or sequence is None or not memory.free:
        return
    arena, taken = footprint.arena(deployment), 0
    if arena is not None and footprint.pooled(settings):
        sequence += arena.slot
    elif arena is not None:
        taken = min(arena.size(settings.batch), memory.room)  # DF020 speaks of an arena that is larger
    cache = memory.cache(taken)
    if cache < sequence:
        what = f"the KV cache gets {format_bytes(cache)} a GPU; one sequence of {tokens} takes {format_bytes(sequence)}"
        yield Fault(what, "lower max_seq_len or max_batch_size, or use more GPUs", SEQUENCE)


@rule(
    "DF027",
    ERROR,
    "the weights fit",
    why="the server stops while it loads",
    source="the checkpoint's files, or its config's sizes",
)
def weights_fit(deployment: Deployment) -> Iterator[Fault]:
    memory = footprint.memory(deployment)
    if memory is not None and not memory.free:
        ranks, card = deployment.settings.tp * deployment.settings.pp, deployment.gpus.card
        what = (
            f"about {format_bytes(memory.weights)} of weights on each of {ranks} ranks do not fit a {card.name} of "
            f"{format_bytes(card.memory)}"
        )
        yield Fault(what, "raise tensor_parallel_size, or use a checkpoint in fewer bits", ("tensor_parallel_size",))
