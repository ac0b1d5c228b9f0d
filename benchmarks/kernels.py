"""The plugins' kernels on a GPU: right against the float64 references, and how much of the memory's speed they reach.

    python -m benchmarks.kernels [--quick] [--json FILE]

Bandwidth is the bytes that must move (each input element that is needed read once, each output written once) by the
time, next to what a copy of 1 GiB reaches. The L2 cache is flushed before each run; the median of many runs counts.
Attention is compared with torch's SDPA, and with FlashInfer where it is installed, over the same keys laid out as they
like them. Exit code 1 if a result is wrong or a goal is missed. Without a GPU it says so and ends.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_checks import checks
from dflash_trt.measure.machine import describe_machine
from dflash_trt.plugins.kernels.spec import SHIPPED

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 8, 32, 128)
BLOCKS = (8, 10, 16)
ROWS = (16, 256, 4096, 16384)  # new context rows of one injection
ATTENTION, ATTENTION_FROM = 0.80, (16384, 8)  # goal from this context and batch on
INJECTION, INJECTION_FROM = 0.70, 4096  # goal from this many rows on
MEMORY = 0.7  # share of the free memory that a case may take


def main(
    quick: bool = typer.Option(False, "--quick", help="Fewer contexts, batches and blocks."),
    json_file: Path = typer.Option(None, "--json", help="Also write the figures here."),
) -> None:
    import torch

    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was run. `dflash-trt plugins report` shows what the kernels compile to.")
        return
    console = Console()
    wrong = [check for check in checks("cuda") if not check["right"]]
    copy = copy_bandwidth()
    injection = list(measure_injection(quick))
    attention = list(measure_attention(quick))
    record = {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "machine": describe_machine(None, "torch", "triton", "flashinfer-python"),
        "command": " ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
        "copy_bytes_per_second": copy,
        "wrong": wrong,
        "kv_inject": injection,
        "block_attention": attention,
    }
    missed = show(console, record)
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    raise typer.Exit(int(bool(wrong or missed)))


def seconds(run: Callable[[], Any]) -> float:
    """Median of a launch, the L2 cache flushed before."""
    from triton.testing import do_bench

    return do_bench(run, warmup=25, rep=100, return_mode="median") / 1e3


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def fits(nbytes: float) -> bool:
    import torch

    return nbytes < MEMORY * torch.cuda.mem_get_info()[0]


def measure_injection(quick: bool) -> Iterator[dict[str, Any]]:
    """Each model's drafter, all layers at once."""
    import torch

    from dflash_trt.plugins.kernels.kv_inject import launch

    for config in SHIPPED:
        heads, dim, kind = 2 * config.layers * config.kv_heads, config.head_dim, getattr(torch, config.dtype)
        for rows in ROWS[-2:] if quick else ROWS:
            batch = min(rows // 16, 16)
            query = rows // batch
            moved = rows * (2 * heads * dim * kind.itemsize + 2 * dim // 2 * 4)
            if not fits(3 * moved):
                continue
            x = torch.randn(batch, query, heads * dim, device="cuda", dtype=kind)
            angles = torch.randn(batch, query, dim // 2, device="cuda")
            k_norm = torch.ones(config.layers, dim, device="cuda", dtype=kind)
            cache = torch.zeros(batch, heads, query + 64, dim, device="cuda", dtype=kind)
            start = torch.full((batch,), 32, device="cuda")
            count = torch.full((batch,), query, device="cuda")
            cos, sin, how = angles.cos(), angles.sin(), {"layers": config.layers, "eps": config.eps}

            def run(arguments: Any = (x, cos, sin, k_norm, start, count, cache), how: Any = how) -> Any:
                return launch(*arguments, **how)

            yield {"model": config.name, "rows": rows, "bytes": moved, "seconds": seconds(run)}


def measure_attention(quick: bool) -> Iterator[dict[str, Any]]:
    """Drafting (all of the block sees all) and verifying (causal), every sequence at the full context."""
    import torch

    from dflash_trt.plugins.kernels.block_attention import launch

    for config in SHIPPED:
        kind, dim, group = getattr(torch, config.dtype), config.head_dim, config.kv_heads
        for context in CONTEXTS[2:4] if quick else CONTEXTS:
            for batch in BATCHES[:2] if quick else BATCHES:
                one = batch * group * context * dim * kind.itemsize
                if not fits(4.5 * one):  # ours, and the copy for the others
                    continue
                cache = torch.randn(batch, 2 * group, context, dim, device="cuda", dtype=kind)
                for block in BLOCKS[-1:] if quick else BLOCKS:
                    q = torch.randn(batch, config.heads, block, dim, device="cuda", dtype=kind)
                    k, v = (torch.randn(batch, group, block, dim, device="cuda", dtype=kind) for _ in range(2))
                    start, count = (torch.full((batch,), n, device="cuda") for n in (context, block))
                    moved = 2 * one + (2 * q.numel() + 2 * k.numel()) * kind.itemsize
                    for causal in (False, True):
                        how = {"k_head": 0, "v_head": group, "causal": causal}

                        def run(arguments: Any = (q, k, v, cache, start, count), how: Any = how) -> Any:
                            return launch(*arguments, **how)

                        case = {"model": config.name, "context": context, "batch": batch, "block": block}
                        case |= {"causal": causal, "bytes": moved, "seconds": seconds(run)}
                        yield case | rivals(q, k, v, cache, causal)


def rivals(q: Any, k: Any, v: Any, cache: Any, causal: bool) -> dict[str, Any]:
    """Seconds of others over context and block laid end to end, which nobody is charged for; a text where one fails."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    group, block = k.shape[1], q.shape[2]
    keys, values = torch.cat([cache[:, :group], k], 2), torch.cat([cache[:, group:], v], 2)
    mask = torch.ones(block, keys.shape[2], dtype=torch.bool, device="cuda").tril(keys.shape[2] - block)

    def sdpa() -> Any:
        return scaled_dot_product_attention(q, keys, values, mask if causal else None, enable_gqa=True)

    found: dict[str, Any] = {}
    for name, prepare in (("sdpa", lambda: sdpa), ("flashinfer", lambda: flashinfer(q, keys, values, causal))):
        try:
            found[name] = seconds(prepare())
        except ImportError:
            continue
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def flashinfer(q: Any, keys: Any, values: Any, causal: bool) -> Callable[[], Any]:
    """Its ragged batch prefill, planned beforehand."""
    import torch
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper  # type: ignore[import-not-found]

    (batch, heads, block, dim), (group, length) = q.shape, keys.shape[1:3]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(starts * block, starts * length, heads, group, dim, causal=causal, q_data_type=q.dtype)
    flat = [x.transpose(1, 2).reshape(-1, x.shape[1], dim).contiguous() for x in (q, keys, values)]
    return lambda: wrapper.run(*flat)


def show(console: Console, record: dict[str, Any]) -> int:
    """Print it; returns how many goals are missed. Marks each case with its share of the copy's bandwidth."""
    copy, missed = record["copy_bytes_per_second"], 0
    console.print(f"{record['card']}, {record['date']}: a copy moves {copy / 1e9:,.0f} GB/s")
    for check in record["wrong"]:
        console.print(f"[red]wrong[/] {check}")
    inject = Table("model", "rows", "time", "GB/s", "of copy", title="kv_inject")
    for case in record["kv_inject"]:
        case["goal"] = INJECTION if case["rows"] >= INJECTION_FROM else None
        missed += _judge(case, copy)
        inject.add_row(case["model"], str(case["rows"]), *_figures(case))
    attend = Table(
        "model", "context", "batch", "block", "mask", "time", "GB/s", "of copy", "SDPA", "FlashInfer",
        title="block_attention",
    )  # fmt: skip
    for case in record["block_attention"]:
        reached = case["context"] >= ATTENTION_FROM[0] and case["batch"] >= ATTENTION_FROM[1]
        case["goal"] = ATTENTION if reached else None
        missed += _judge(case, copy)
        sizes = [f"{case[name]:,}" for name in ("context", "batch", "block")]
        others = [_times(case.get(name), case["seconds"]) for name in ("sdpa", "flashinfer")]
        attend.add_row(case["model"], *sizes, "causal" if case["causal"] else "all", *_figures(case), *others)
    console.print(inject, attend)
    return missed


def _judge(case: dict[str, Any], copy: float) -> bool:
    case["of_copy"] = case["bytes"] / case["seconds"] / copy
    return case["goal"] is not None and case["of_copy"] < case["goal"]


def _figures(case: dict[str, Any]) -> tuple[str, str, str]:
    share = f"{case['of_copy']:.0%}"
    if case["goal"] is not None:
        share = f"[{'green' if case['of_copy'] >= case['goal'] else 'red'}]{share}[/]"
    return f"{case['seconds'] * 1e6:,.1f} µs", f"{case['bytes'] / case['seconds'] / 1e9:,.0f}", share


def _times(other: float | str | None, own: float) -> str:
    return f"{other / own:.2f}×" if isinstance(other, float) else ("failed" if other else "-")


if __name__ == "__main__":
    typer.run(main)
