"""Top-1 over a vocabulary shard, so that tensor-parallel ranks exchange two numbers a position instead of logits.

Two ops: the best of each chunk, [C, N], and the best of C parts. One program a row would read 0.4 MB (V = 200,000,
bfloat16) alone, and one SM draws some 0.1 TB/s: 4 µs and more, however few the rows; chunks spread a step of one
sequence over the whole GPU. The second op takes the parts of all ranks as well: gathered along their first axis they
are [ranks * C, N].

Among equals the smallest token wins in both, so the result does not depend on how the vocabulary is cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.kernels.spec import SHIPPED, Argument, Config, Kernel

CHUNK = 8192  # logits that one program looks at
PARTS, POSITIONS = 32, 16  # tile of `draft_head_combine`

CONFIGS = SHIPPED


@triton.jit
def draft_head(logits, offset, N, value, index, V: tl.constexpr, CHUNK: tl.constexpr):
    """logits T or f32 [N, V] of the tokens offset[0] + 0 … V-1 → value f32 [C, N], index i64 [C, N]."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
    # the maximum first, then its place: fewer instructions than a maximum that carries its place along
    best = tl.max(x, axis=0)
    token = tl.minimum(tl.min(tl.where(x == best, i, V), axis=0), V - 1)  # in range even where all are NaN
    tl.store(value + chunk * N + row, best)
    tl.store(index + chunk * N + row, tl.load(offset) + token)


@triton.jit
def draft_head_combine(
    value, index, C, N, best_value, best_index, PARTS: tl.constexpr, POSITIONS: tl.constexpr
):  # fmt: skip
    """value f32 [C, N], index i64 [C, N] → best_value f32 [N], best_index i64 [N]."""
    n = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    held = n < N
    best = tl.full([POSITIONS], -float("inf"), tl.float32)
    token = tl.load(index + n, mask=held, other=0)
    for first in range(0, C, PARTS):
        c = first + tl.arange(0, PARTS)[:, None]
        inside = (c < C) & held[None, :]
        x = tl.load(value + c * N + n[None, :], mask=inside, other=-float("inf"))
        at = tl.load(index + c * N + n[None, :], mask=inside, other=0x7FFFFFFFFFFFFFFF)
        peak = tl.max(x, axis=0)
        at = tl.min(tl.where(x == peak[None, :], at, 0x7FFFFFFFFFFFFFFF), axis=0)
        # of NaN alone nothing is taken: a token stays in range
        token = tl.where(peak > best, at, tl.where(peak == best, tl.minimum(at, token), token))
        best = tl.maximum(peak, best)
    tl.store(best_value + n, best, mask=held)
    tl.store(best_index + n, token, mask=held)


def kernels(config: Config) -> list[Kernel]:
    """`draft_head` over logits of the model's dtype and over float32 ones, and the one `draft_head_combine`.

    Only the latter where no vocabulary is given.
    """
    outputs = (Argument("value", "*fp32", output=True), Argument("index", "*i64", output=True))
    made = [
        Kernel(
            op="draft_head",
            name=f"v{config.vocab}-{dtype}",
            function=draft_head,
            arguments=(Argument("logits", pointer), Argument("offset", "*i64"), Argument("N", "i32"), *outputs),
            constants={"V": config.vocab, "CHUNK": CHUNK},
            grid=(str(chunks(config.vocab)), "N", "1"),
            num_warps=8,
            config=config,
        )
        for dtype, pointer in ((config.dtype, config.pointer), ("float32", "*fp32"))
        if config.vocab
    ]
    made.append(
        Kernel(
            op="draft_head_combine",
            name="any",
            function=draft_head_combine,
            arguments=(
                Argument("value", "*fp32"),
                Argument("index", "*i64"),
                Argument("C", "i32"),
                Argument("N", "i32"),
                Argument("best_value", "*fp32", output=True),
                Argument("best_index", "*i64", output=True),
            ),
            constants={"PARTS": PARTS, "POSITIONS": POSITIONS},
            grid=(f"cdiv(N, {POSITIONS})", "1", "1"),
            config=config,
        )
    )
    return made


def chunks(vocab: int) -> int:
    """C of one shard."""
    return triton.cdiv(vocab, CHUNK)


def launch_parts(logits: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, V], offset int64 [1] → the best of each chunk, value float32 and index int64 [C, N]."""
    count, vocab = logits.shape
    value = torch.empty((chunks(vocab), count), dtype=torch.float32, device=logits.device)
    index = torch.empty((chunks(vocab), count), dtype=torch.int64, device=logits.device)
    draft_head[(chunks(vocab), count)](logits, offset, count, value, index, V=vocab, CHUNK=CHUNK, num_warps=8)
    return value, index


def launch_combine(value: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """value float32, index int64 [C, N] → the best of all, [N] each."""
    parts, count = value.shape
    best, token = torch.empty_like(value[0]), torch.empty_like(index[0])
    draft_head_combine[(triton.cdiv(count, POSITIONS),)](
        value, index, parts, count, best, token, PARTS=PARTS, POSITIONS=POSITIONS
    )
    return best, token


def launch(logits: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, V], offset int64 [1] → value float32 [N], index int64 [N] of one shard."""
    return launch_combine(*launch_parts(logits, offset))
