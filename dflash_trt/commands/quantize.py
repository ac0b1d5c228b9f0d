"""`dflash-trt quantize`: make NVFP4 checkpoints of a target, a drafter or both, through NVIDIA ModelOpt."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from dflash_trt.commands.progress import progress_bar
from dflash_trt.errors import UserError
from dflash_trt.quantize.job import Settings
from dflash_trt.quantize.job import quantize as run
from dflash_trt.quantize.presets import PRESETS, Preset
from dflash_trt.quantize.report import show_report
from dflash_trt.quantize.resume import work_folder

TARGET_PRESET, DRAFT_PRESET = "nvfp4", "nvfp4-mlp"
TABLE = "; ".join(f"{preset.name}: {preset.summary}" for preset in PRESETS.values())


def quantize(
    target: Path | None = typer.Option(None, help="Checkpoint directory of the target.", show_default=False),
    draft: Path | None = typer.Option(None, help="Checkpoint directory of the drafter.", show_default=False),
    output: Path = typer.Option(
        ..., "--output", "-o", help="Folder to make; gets `target` and `draft` inside.", show_default=False
    ),
    preset: str | None = typer.Option(
        None, help=f"What to quantize. Not given: {TARGET_PRESET} for the target and, as vLLM and TensorRT-LLM slice "
        f"the q/k/v of drafters, {DRAFT_PRESET} for the drafter. {TABLE}.", show_default=False,
    ),
    draft_preset: str | None = typer.Option(None, help="Another preset for the drafter alone.", show_default=False),
    calib: str = typer.Option(
        "builtin", help="Calibration text: a .jsonl, .json or text file, or `builtin`: short prompts of many kinds."
    ),
    target_only: bool = typer.Option(False, "--target-only", help="Quantize the target alone."),
    draft_only: bool = typer.Option(False, "--draft-only", help="Quantize the drafter alone."),
    include: list[str] = typer.Option([], help="Quantize `fc` or `lm_head` too; may be given twice."),
    input_amax: float | None = typer.Option(
        None, help="Largest activation, set for every layer instead of calibrating: for targets too large to load.",
        show_default=False,
    ),
    calib_samples: int = typer.Option(64, min=1, help="Texts at most."),
    calib_length: int = typer.Option(512, min=2, help="Tokens of a text at most; longer ones are cut into several."),
    seed: int = typer.Option(0, help="Chooses texts and anchors."),
    block_size: int | None = typer.Option(
        None, help="The drafter's block where its config names none.", show_default=False
    ),
    shard_size: float = typer.Option(4.0, help="GiB of a shard at most."),
    force: bool = typer.Option(False, "--force", help="Replace quantized checkpoints in OUTPUT."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:  # fmt: skip
    """Quantize a pair to NVFP4: ModelOpt calibrates, OUTPUT gets checkpoints for `convert`, TensorRT-LLM and vLLM.

    Interrupted, the same command goes on. The report is also in OUTPUT/quantization_report.json.
    """
    presets = {
        "target": _preset(preset or TARGET_PRESET, "--preset"),
        "draft": _preset(draft_preset or preset or DRAFT_PRESET, "--draft-preset" if draft_preset else "--preset"),
    }
    if input_amax is not None and not 1e-30 < input_amax < 1e30:  # its scale is a float32
        raise UserError(f"{input_amax} is not a magnitude", where="--input-amax", fix="give a positive number, say 448")
    if not 0 < shard_size < 1e9:
        raise UserError(f"{shard_size} GiB are no size of a file", where="--shard-size", fix="give some GiB, say 4")
    settings = Settings(
        presets, tuple(include), calib, calib_samples, calib_length, seed, input_amax, block_size,
        shard_bytes=int(shard_size * 2**30), force=force,
    )  # fmt: skip
    sources = _sources(target, draft, target_only, draft_only)
    if draft_preset and "draft" not in sources:
        raise UserError("no drafter is quantized", where="--draft-preset", fix="pass --draft DIR or leave it out")
    with progress_bar() as progress:
        report = run(sources, output, settings, target=target, progress=progress)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show_report(Console(), {role: report["checkpoints"][role] for role in sources})
    for folder in sorted(output.glob(work_folder(output / "*").name)):
        what = f"unfinished work of another run lies in {folder}: run that again, or remove it"
        Console(stderr=True).print(f"[yellow]{escape(what)}[/]", soft_wrap=True)


def _preset(name: str, option: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}", where=option, fix=f"choose from {', '.join(PRESETS)}")
    return PRESETS[name]


def _sources(target: Path | None, draft: Path | None, target_only: bool, draft_only: bool) -> dict[str, Path]:
    """What to quantize, by role."""
    if target_only and draft_only:
        raise UserError("--target-only and --draft-only exclude each other", where="quantize", fix="pass one or none")
    given = {"target": None if draft_only else target, "draft": None if target_only else draft}
    for role, only in (("target", target_only), ("draft", draft_only)):
        if only and given[role] is None:
            raise UserError(f"--{role}-only without --{role}", where="quantize", fix=f"pass --{role} DIR")
    sources = {role: path for role, path in given.items() if path is not None}
    if not sources:
        raise UserError("there is nothing to quantize", where="quantize", fix="pass --target DIR, --draft DIR or both")
    return sources
