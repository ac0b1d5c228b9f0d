"""The whole of `dflash-trt quantize`: plans, text, calibration, writing, report; resumable from calibration on.

What can be refused is refused before a model is loaded. `OUTPUT/.quantize.json` keeps what calibration found and which
checkpoint is complete, until all are; the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint import Draft, read_draft
from dflash_trt.checkpoint.card import is_draft
from dflash_trt.checkpoint.config import read_config
from dflash_trt.errors import Failure, UserError
from dflash_trt.progress import Progress, silent
from dflash_trt.quantize.calibrate import DRAFT, TARGET, calibrate, needs_calibration
from dflash_trt.quantize.modelopt import check_device, load
from dflash_trt.quantize.plan import Plan, make_plan
from dflash_trt.quantize.presets import Preset
from dflash_trt.quantize.report import describe, save_report
from dflash_trt.quantize.resume import AGAIN, check_place
from dflash_trt.quantize.state import State, fingerprint
from dflash_trt.quantize.target_model import load_tokenizer
from dflash_trt.quantize.text import BUILTIN, encode_samples, read_samples
from dflash_trt.quantize.write import SHARD_BYTES, Written, write_checkpoint

AWQ = "awq_lite"
OWNERS = {"fc": DRAFT, "lm_head": TARGET}  # whose checkpoint has a module that --include can name


@dataclass(frozen=True)
class Settings:
    """What the command line says beside the paths."""

    presets: Mapping[str, Preset]  # by role
    include: tuple[str, ...] = ()
    calib: str = BUILTIN
    samples: int = 64
    length: int = 512
    seed: int = 0
    input_amax: float | None = None  # of every layer, instead of calibration
    block_size: int | None = None  # of drafters whose config does not tell
    shard_bytes: int = SHARD_BYTES
    force: bool = False


def quantize(
    sources: Mapping[str, Path],
    output: Path,
    settings: Settings,
    *,
    target: Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Quantize the checkpoints of `sources` ("target", "draft") into folders of `output` of these names.

    `target` is the one to calibrate with; needed unless nothing is calibrated. Returns the report, as saved in
    `output`. Raises UserError for whatever cannot be done, Failure if calibration does not reach a module.
    """
    plans = {
        role: make_plan(path, settings.presets[role], _include(role, sources, settings))
        for role, path in sources.items()
    }
    draft = _check_sources(sources, settings)
    _check(plans, settings)
    unknown = settings.input_amax is None
    calibrated = {role: plan for role, plan in plans.items() if unknown and needs_calibration(plan)}
    reads = _check_calibration(calibrated, target, progress) if calibrated else None  # the target that it reads
    texts = _read_texts(reads, settings, progress) if reads else []

    job = fingerprint(plans, reads, texts, settings)
    state = State.read(output, job)
    for role, plan in plans.items():
        if role not in state.written:
            _check_place(output / role, plan.source, settings.force)
    with _folder(output):
        if TARGET in plans.keys() - state.written.keys() and plans[TARGET].preset.algorithm == AWQ:
            from dflash_trt.quantize.awq import export_awq

            state.written[TARGET] = export_awq(plans[TARGET], output / TARGET, texts, settings.force, progress)
            state.save()
        asked = {role: plan for role, plan in calibrated.items() if role not in state.written}
        if reads and state.amax is None and asked:
            _, state.amax = calibrate(asked, reads, draft, texts, seed=settings.seed, progress=progress)
        state.save()
        for role in sorted(plans):  # the drafter, which is small, first
            if role not in state.written:
                state.written[role] = _write(role, plans[role], output, state, settings, progress)
        text = {"text": settings.calib, "texts": len(texts), "tokens": sum(map(len, texts)), "seed": settings.seed}
        records = {
            role: describe(role, plan, state.written[role], calibration=text if role in calibrated else None,
                           input_amax=settings.input_amax)
            for role, plan in plans.items()
        }  # fmt: skip
        report = save_report(output, records)
        state.remove()
    return report


def _write(
    role: str,
    plan: Plan,
    output: Path,
    state: State,
    settings: Settings,
    progress: Progress,
) -> Written:
    def finish(written: Written) -> None:
        state.written[role] = written
        state.save()  # before the checkpoint has its name: a kill in between must not make it a stranger's

    return write_checkpoint(
        plan,
        output / role,
        state.amax.get(role) if state.amax else None,
        finishing=finish,
        input_amax=settings.input_amax if plan.preset.activations else None,
        force=settings.force,
        shard_bytes=settings.shard_bytes,
        progress=lambda what, fraction: progress(f"{role}: {what}", fraction),
    )


def _include(role: str, sources: Mapping[str, Path], settings: Settings) -> Sequence[str]:
    """Names go to the checkpoint that has them, or to all, where a plan explains why it has not."""
    return [name for name in settings.include if OWNERS.get(name, role) == role or OWNERS[name] not in sources]


def _check_sources(sources: Mapping[str, Path], settings: Settings) -> Draft | None:
    """Refuse what no engine could be made of, however it were quantized. Targets may be of any family."""
    if TARGET in sources and is_draft(read_config(sources[TARGET])):
        raise UserError("this is a drafter", where=f"--target {sources[TARGET]}", fix="pass it as --draft")
    return read_draft(sources[DRAFT], settings.block_size) if DRAFT in sources else None


def _check(plans: Mapping[str, Plan], settings: Settings) -> None:
    for plan in plans.values():
        check_device(plan.preset)
        experts = (linear.module for linear in plan.linears if ".experts." in linear.module)
        if plan.preset.algorithm == "mse" and (expert := next(experts, None)):
            fix = "choose nvfp4 or nvfp4-experts"
            raise UserError(f"{plan.preset.name} does not search in experts", where=expert, fix=fix)
        if settings.input_amax is not None and plan.preset.algorithm != "max":
            fix = "leave it out, or choose nvfp4"
            raise UserError(f"{plan.preset.name} calibrates the inputs itself", where="--input-amax", fix=fix)
    if DRAFT in plans and (preset := plans[DRAFT].preset).algorithm == AWQ:
        fix = "pass --draft-preset nvfp4-mlp, or --target-only"
        raise UserError(f"{preset.name} is for targets alone", where="--draft", fix=fix)
    if settings.input_amax is not None and not any(plan.preset.activations for plan in plans.values()):
        name = next(iter(plans.values())).preset.name
        raise UserError(f"{name} leaves inputs as they are", where="--input-amax", fix="leave it out")


def _check_calibration(plans: Mapping[str, Plan], target: Path | None, progress: Progress) -> Path:
    if target is None:
        raise UserError(
            "calibration needs the target: a drafter reads its features",
            where=f"preset {next(iter(plans.values())).preset.name}",
            fix="pass --target, or --input-amax to do without, or choose nvfp4-weight-only",
        )
    progress("loading ModelOpt", 0)
    for name in ("torch", "transformers", "modelopt.torch.quantization"):
        load(name)
    return target


def _read_texts(target: Path, settings: Settings, progress: Progress) -> list[list[int]]:
    progress("reading the text", 0)
    samples = read_samples(settings.calib)
    tokenizer = load_tokenizer(target)
    return encode_samples(
        samples, tokenizer, count=settings.samples, length=settings.length, seed=settings.seed, where=settings.calib
    )


def _check_place(output: Path, source: Path, force: bool) -> None:
    """The writer would find the same, but after calibration."""
    for folder in (output.parent, output.parent.parent):
        if os.path.lexists(folder) and not folder.is_dir():
            raise UserError("not a folder", where=folder, fix="choose another --output")
    check_place(output, source, force)


@contextlib.contextmanager
def _folder(output: Path) -> Iterator[None]:
    """Make the folder if its parent is there; leave none behind that is empty."""
    try:
        output.mkdir(exist_ok=True)
    except FileNotFoundError:
        fix = f"create it: mkdir -p {output.parent}"
        raise UserError("no such folder", where=output.parent, fix=fix) from None
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            output.rmdir()
        if isinstance(error, OSError):  # a full disk tells no name
            raise Failure(f"{error.strerror or error} — {error.filename or output} — {AGAIN}") from error
        raise
