"""Acceptance of drafts, and inverse-CDF sampling that depends on nothing but the row.

`accept` handles a few integers a sequence: latency is all of it, so one launch replaces a dozen of tiny layers.

`sample` finds where the cumulated weights pass uniform * total. Sums of floats depend on their order, and a parallel
scan of them need not even rise: it could pick a token of weight zero. So weights are summed as fixed-point integers,
which is exact in any order; the graph's float32 sums may decide otherwise where uniform lies within their rounding of
a token's edge. It takes two ops where V exceeds a chunk: sums of chunks by many programs, then per row a
search among the sums and a scan of the one chunk that holds the answer. One program a row would read 0.8 MB (V =
200,000) alone, and one SM draws some 0.1 TB/s: 8 µs, however few the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.kernels.spec import MODELS, Argument, Config, Kernel

SEQUENCES = 8  # of one program of `accept`
CHUNK = 4096  # weights that one program sums
CANDIDATES = 1024  # the graph's list for top_k and top_p (`dflash_trt.graph.accept`); one chunk holds it

CONFIGS = MODELS  # every rank does this alike, over the whole vocabulary


@triton.jit
def accept(
    greedy, sampled, temperature, ids, n_valid, n_given, past_len,
    B, Q,
    n_accepted, next_token, new_len,
    K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """greedy and sampled i64 [B, K], temperature f32 [B], ids i64 [B, Q], the rest i64 [B]; WIDTH ≥ K, a power of 2."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = b < B
    t = tl.arange(0, WIDTH)[None, :]
    place = b[:, None] * K + t
    inside = held[:, None] & (t < K)
    hot = tl.load(temperature + b, mask=held, other=0.0) > 0
    choice = tl.load(greedy + place, mask=inside & (hot == 0)[:, None], other=0)
    choice += tl.load(sampled + place, mask=inside & hot[:, None], other=0)

    given = tl.load(n_given + b, mask=held, other=0)
    drafts = tl.load(n_valid + b, mask=held, other=0) - given
    column = tl.maximum(tl.minimum(given[:, None] + t, Q - 1), 0)  # of draft t
    draft = tl.load(ids + b[:, None].to(tl.int64) * Q + column, mask=inside, other=0)
    right = (t < K - 1) & (t < drafts[:, None]) & (draft == choice)
    accepted = tl.min(tl.where(right, WIDTH, t + tl.zeros([ROWS, WIDTH], tl.int32)), axis=1)  # the first wrong one

    token = tl.sum(tl.where(t == accepted[:, None], choice, 0), axis=1)
    past = tl.load(past_len + b, mask=held, other=0)
    tl.store(n_accepted + b, accepted.to(tl.int64), mask=held)
    tl.store(next_token + b, token, mask=held)
    tl.store(new_len + b, past + given + accepted, mask=held)


@triton.jit
def _fixed(weights, row, chunk, V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of a row in units of 1 / SCALE, int64 [CHUNK]. For V up to 2**18 a weight of 2**-20 or more is exact."""
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(weights + row.to(tl.int64) * V + i, mask=i < V, other=0.0)
    return (x * SCALE).to(tl.int64)


@triton.jit
def sample_sums(weights, N, sums, V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """weights f32 [N, V] in [0, 1] → sums of chunks i64 [N, CHUNKS]."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    total = tl.sum(_fixed(weights, row, chunk, V, SCALE, CHUNK), axis=0)
    tl.store(sums + row * CHUNKS + chunk, total)


@triton.jit
def sample(
    weights, uniform, sums, N, index,
    V: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """weights f32 [N, V] in [0, 1], uniform f32 [N], sums of `sample_sums` or None if one chunk holds V → i64 [N].

    An entry lies below if its cumulated weight is at most uniform * total and less than total, as in the graph.
    """
    row = tl.program_id(0)
    if sums is None:
        chunk = row * 0
        x = _fixed(weights, row, chunk, V, SCALE, CHUNK)
        reached = tl.cumsum(x, axis=0)
        total = tl.sum(x, axis=0)
        goal = _goal(uniform, row, total)
    else:
        c = tl.arange(0, WIDTH)
        part = tl.load(sums + row * CHUNKS + c, mask=c < CHUNKS, other=0)
        total = tl.sum(part, axis=0)
        goal = _goal(uniform, row, total)
        through = tl.cumsum(part, axis=0)
        passed = (through <= goal) & (through < total)
        chunk = tl.sum(passed.to(tl.int32), axis=0)
        chunk = tl.minimum(chunk, CHUNKS - 1)
        before = tl.sum(tl.where(passed, part, 0), axis=0)
        reached = before + tl.cumsum(_fixed(weights, row, chunk, V, SCALE, CHUNK), axis=0)
    below = (reached <= goal) & (reached < total)
    found = chunk * CHUNK + tl.sum(below.to(tl.int32), axis=0)
    tl.store(index + row, tl.minimum(found, V - 1).to(tl.int64))


@triton.jit
def _goal(uniform, row, total):
    """uniform * total in units of the sums. float64 keeps it under total for every float32 uniform under 1."""
    return (tl.load(uniform + row).to(tl.float64) * total.to(tl.float64)).to(tl.int64)


def kernels(config: Config) -> list[Kernel]:
    """`accept` for a block, and sampling from all tokens (two ops) and from the list of candidates (one).

    Sampling is left out where no vocabulary is given.
    """
    sums = Argument("sums", "*i64")
    weights, uniform = Argument("weights", "*fp32"), Argument("uniform", "*fp32")
    rows, index = Argument("N", "i32"), Argument("index", "*i64", output=True)
    made = [
        Kernel(
            op="accept",
            name=f"k{config.block}",
            function=accept,
            arguments=(
                *(Argument(name, "*i64") for name in ("greedy", "sampled")),
                Argument("temperature", "*fp32"),
                *(Argument(name, "*i64") for name in ("ids", "n_valid", "n_given", "past_len")),
                *(Argument(name, "i32") for name in "BQ"),
                *(Argument(name, "*i64", output=True) for name in ("n_accepted", "next_token", "new_len")),
            ),
            constants=_block_constants(config.block),
            grid=(f"cdiv(B, {SEQUENCES})", "1", "1"),
            config=config,
        )
    ]
    for vocab in sorted({config.vocab, min(CANDIDATES, config.vocab)} - {0}, reverse=True):
        constants = _sample_constants(vocab)
        chunks, wide = constants["CHUNKS"], vocab > CHUNK
        if wide:
            made.append(
                Kernel(
                    op="sample_sums",
                    name=f"v{vocab}",
                    function=sample_sums,
                    arguments=(weights, rows, Argument("sums", "*i64", output=True)),
                    constants={k: v for k, v in constants.items() if k != "WIDTH"},
                    grid=(str(chunks), "N", "1"),
                    config=config,
                )
            )
        made.append(
            Kernel(
                op="sample",
                name=f"v{vocab}",
                function=sample,
                arguments=(weights, uniform, *([sums] if wide else []), rows, index),
                constants=constants if wide else constants | {"sums": None},
                grid=("N", "1", "1"),
                num_warps=8,
                config=config,
            )
        )
    return made


def _block_constants(block: int) -> dict:
    return {"K": block, "WIDTH": triton.next_power_of_2(block), "ROWS": SEQUENCES}


def _sample_constants(vocab: int) -> dict:
    """The scale leaves room for V weights under 2 in 63 bits."""
    chunk = min(triton.next_power_of_2(vocab), CHUNK)
    chunks = triton.cdiv(vocab, chunk)
    return {
        "V": vocab,
        "SCALE": 2.0 ** (61 - (vocab - 1).bit_length()),
        "CHUNK": chunk,
        "CHUNKS": chunks,
        "WIDTH": triton.next_power_of_2(chunks),
    }


def launch_accept(
    greedy: torch.Tensor,
    sampled: torch.Tensor,
    temperature: torch.Tensor,
    ids: torch.Tensor,
    n_valid: torch.Tensor,
    n_given: torch.Tensor,
    past_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted drafts, next token and new length, int64 [B] each."""
    batch, block = greedy.shape
    n_accepted, next_token, new_len = (torch.empty_like(past_len) for _ in range(3))
    accept[(triton.cdiv(batch, SEQUENCES),)](
        greedy, sampled, temperature, ids, n_valid, n_given, past_len, batch, ids.shape[1],
        n_accepted, next_token, new_len, **_block_constants(block),
    )  # fmt: skip
    return n_accepted, next_token, new_len


def launch_sample(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """weights float32 [N, V] in [0, 1], uniform float32 [N] → int64 [N]."""
    count, vocab = weights.shape
    constants = _sample_constants(vocab)
    chunks = constants["CHUNKS"]
    index = torch.empty(count, dtype=torch.int64, device=weights.device)
    sums = None
    if chunks > 1:
        sums = torch.empty((count, chunks), dtype=torch.int64, device=weights.device)
        shared = {k: v for k, v in constants.items() if k != "WIDTH"}
        sample_sums[(chunks, count)](weights, count, sums, **shared)
    sample[(count,)](weights, uniform, sums, count, index, **constants, num_warps=8)
    return index
