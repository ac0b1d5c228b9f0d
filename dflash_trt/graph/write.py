"""Put step graphs on disk: small ONNX files whose weights stay in the checkpoint's own files."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from dflash_trt.checkpoint import Pair
from dflash_trt.graph.mapping import SINGLE, Rank
from dflash_trt.graph.names import graph_file
from dflash_trt.graph.shard import place
from dflash_trt.graph.step import build_step


def write_step(
    pair: Pair,
    directory: Path,
    name: str,
    *,
    dtype: str,
    cache_len: int | None = None,
    ops: str = "native",
    moe: str = "native",
    debug: bool = False,
    rank: Rank = SINGLE,
) -> Path:
    """Write `directory/NAME.onnx` and, under `directory/weights/`, a link to every checkpoint file it refers to.

    `pair` is what `shard.place` made of the checkpoints for `rank`, with `directory` for what it had to write.

    TensorRT's parser follows the links; ONNX Runtime refuses external data outside the model's folder, so its session
    maps the files itself. Returns the graph's path. Arguments as for `build_step`.
    """
    net = build_step(pair, dtype=dtype, cache_len=cache_len, ops=ops, moe=moe, debug=debug, rank=rank, beside=directory)
    path = directory / f"{name}.onnx"
    ir.save(net.model(name), path)
    for location, file in net.links.items():
        link = directory / location
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(file.resolve())
    return path


def write_graphs(
    pair: Pair,
    directory: Path,
    *,
    rank: Rank = SINGLE,
    dtype: str,
    cache_len: int,
    ops: str = "native",
    moe: str = "native",
) -> list[Path]:
    """Write every graph of one rank: with and without the drafter, for TensorRT and for a CPU.

    Weights that no graph can refer to in their checkpoints go to `rankN.safetensors`.

    `rankN.onnx` and `rankN-ar.onnx` compute in `dtype` over caches of `cache_len` positions, as TensorRT compiles them;
    `rankN.cpu.onnx` and `rankN-ar.cpu.onnx` in float32 over caches of any length, as ONNX Runtime runs them.
    """
    pair = place(pair, rank, directory)
    paths = []
    for variant in (pair, Pair(pair.target, None)) if pair.draft else (pair,):
        gpu, cpu = (
            Path(graph_file(rank.number, draft=variant.draft is not None, cpu=cpu)).stem for cpu in (False, True)
        )
        paths += [
            write_step(variant, directory, gpu, dtype=dtype, cache_len=cache_len, ops=ops, moe=moe, rank=rank),
            write_step(variant, directory, cpu, dtype="float32", ops=ops, rank=rank),
        ]
    return paths
