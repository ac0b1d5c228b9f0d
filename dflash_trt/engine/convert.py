"""Checkpoints in, engine directory out. Weights stay where they are: the graphs refer to the checkpoints' own files."""

from __future__ import annotations

import platform
import shutil
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from dflash_trt import __version__
from dflash_trt.checkpoint import Draft, Pair, Quantization, Target, pair, read_draft, read_target
from dflash_trt.engine.directory import staged
from dflash_trt.engine.fingerprint import fingerprint
from dflash_trt.engine.hardware import NVFP4
from dflash_trt.engine.load import Engine
from dflash_trt.engine.manifest import MAJOR, MINOR, File, Limits, Manifest, Model, Nvfp4, WeightFile
from dflash_trt.errors import UserError
from dflash_trt.graph.mapping import Mapping, Rank
from dflash_trt.progress import Progress, silent

DTYPES = ("bfloat16", "float16", "float32")  # float32 for a CPU alone: TensorRT has no attention kernel for it
OPS = ("native", "plugin")
MOE = ("native", "layer")
MAX_BATCH = 8
MAX_SEQ_LEN = 4096  # or what the models can, if less
MAX_QUERY = 256  # enough columns to use a GPU's matrix units in prefill; each costs a cache position

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def convert(
    target: Path,
    draft: Path | None,
    output: Path,
    *,
    dtype: str = DTYPES[0],
    max_batch: int = MAX_BATCH,
    max_seq_len: int | None = None,
    max_query: int = MAX_QUERY,
    block_size: int | None = None,
    tp: int = 1,
    ep: int | None = None,
    ops: str = OPS[0],
    moe: str = MOE[0],
    force: bool = False,
    progress: Progress = silent,
) -> Engine:
    """Write the engine directory `output` for a target and its drafter (None: autoregressive only).

    `dtype` is that of the graphs TensorRT compiles; a CPU computes in float32. `block_size` shortens the drafter's
    block or, where its config names none, gives it. `ops`: attention, caches and acceptance by TensorRT's own layers or
    by this package's plugins; a CPU runs either. `tp` and `ep`: over how many ranks attention and experts are split;
    experts are split by number over all ranks unless `ep` says otherwise. `moe`: experts by TensorRT's general layers
    or by its MOE layer. Raises UserError for checkpoints, limits or a mapping that do not fit.
    """
    from dflash_trt.graph import check_mapping, write_graphs  # onnx-ir takes a second to import

    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported", where="--dtype", fix=f"choose one of {', '.join(DTYPES)}")
    for option, value in {"--max-batch": max_batch, "--max-query": max_query, "--max-seq-len": max_seq_len}.items():
        if value is not None and value < 1:
            raise UserError(f"{value} is too small", where=option, fix="give 1 or more")
    if ops not in OPS:
        raise UserError(f"ops {ops!r} are not supported", where="--ops", fix=f"choose {' or '.join(OPS)}")
    if moe not in MOE:
        raise UserError(f"moe {moe!r} is not supported", where="--moe", fix=f"choose {' or '.join(MOE)}")
    progress("reading the checkpoints", 0)
    models = pair(read_target(target), read_draft(draft, block_size) if draft else None)
    if ep is None:
        ep = tp if models.target.config.experts else 1
    mapping = Mapping(tp, ep)
    check_mapping(models, mapping)
    if moe == "layer" and not models.target.config.experts:
        raise UserError("the target has no experts", where=target, fix="leave --moe out")
    if ops == "plugin":
        from dflash_trt.engine.plugins import check_pair

        check_pair(models, dtype, mapping)
    limits = Limits(
        max_batch=max_batch,
        max_seq_len=_max_seq_len(models, max_seq_len),
        block_size=models.draft.config.block_size if models.draft else 1,
        max_query=max_query,
    )
    with staged(output, force=force) as directory:
        for number in range(mapping.world):
            progress(
                f"writing the graphs of rank {number}" if number else "writing the graphs", 0.8 * number / mapping.world
            )
            rank = Rank(mapping, number)
            write_graphs(models, directory, rank=rank, dtype=dtype, cache_len=limits.cache_len, ops=ops, moe=moe)
        for name in TOKENIZER_FILES:
            if (models.target.path / name).is_file():
                shutil.copyfile(models.target.path / name, directory / name)
        progress("taking fingerprints", 0.8)
        manifest = _describe(models, directory, dtype, mapping, limits, ops, moe)
        manifest.write(directory)
    progress("done", 1)
    return Engine(output, manifest)


def _max_seq_len(models: Pair, wanted: int | None) -> int:
    """The longest sequence: as asked for, or as far as both models' positions reach."""
    halves = [half for half in (models.target, models.draft) if half]
    if wanted is None:
        return min(MAX_SEQ_LEN, *(half.config.max_position for half in halves))
    for half in halves:
        if wanted > half.config.max_position:
            raise UserError(
                f"max_seq_len {wanted} is beyond max_position_embeddings {half.config.max_position}",
                where=half.path / "config.json",
                fix=f"give --max-seq-len {half.config.max_position} or less",
            )
    return wanted


def _describe(
    models: Pair, directory: Path, dtype: str, mapping: Mapping, limits: Limits, ops: str, moe: str
) -> Manifest:
    written = sorted(path for path in directory.iterdir() if path.is_file())
    links = sorted(path for path in directory.rglob("*") if path.is_symlink())
    target, draft = _model(models.target), _model(models.draft) if models.draft else None
    return Manifest(
        format=f"{MAJOR}.{MINOR}",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=target,
        draft=draft,
        dtype=dtype,
        quantization=NVFP4 if target.nvfp4 or (draft and draft.nvfp4) else None,
        mapping=mapping,
        limits=limits,
        vocab=models.target.config.vocab,
        eos_ids=models.target.config.eos_ids,
        files={path.name: File(path.stat().st_size, fingerprint(path)) for path in written},
        weights={str(link.relative_to(directory)): _weight_file(link.resolve()) for link in links},
        engines=(),
        tools={"dflash-trt": __version__, "python": platform.python_version()}
        | {name: version(name) for name in ("onnx", "onnx-ir")},
        ops=ops,
        moe=moe,
    )


def _weight_file(path: Path) -> WeightFile:
    return WeightFile(path.stat().st_size, fingerprint(path), str(path))


def _model(half: Target | Draft) -> Model:
    path, config = half.path.resolve(), half.config
    experts = half.config.experts if isinstance(half, Target) else None
    return Model(
        name=path.name,
        path=str(path),
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        nvfp4=_nvfp4(half.quantization),
        mxfp4=2 * config.layers if experts and experts.storage == "mxfp4" else 0,
    )


def _nvfp4(quantization: Quantization | None) -> Nvfp4 | None:
    if quantization is None or quantization.algo is None:
        return None
    packed = quantization.packed
    return Nvfp4(
        quantization.algo, len(packed), sum(packed.values()), quantization.nbytes, nbytes_bf16=2 * quantization.values
    )
