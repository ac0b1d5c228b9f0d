"""Write the NVFP4 checkpoint of a plan: streamed, in shards, resumable, checked before it appears."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt import __version__
from dflash_trt.checkpoint.config import read_json
from dflash_trt.checkpoint.declared import FLAT_KEY, NESTED_FILE
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.nvfp4 import global_scale
from dflash_trt.checkpoint.shards import ShardWriter, Slot, name_shards, write_index
from dflash_trt.checkpoint.stack import FLOATS
from dflash_trt.progress import Progress, silent
from dflash_trt.quantize.cast import cast
from dflash_trt.quantize.check import check_written
from dflash_trt.quantize.config import quant_configs
from dflash_trt.quantize.pack import Layer, Scales, pack, slots
from dflash_trt.quantize.plan import Amax, Linear, Plan
from dflash_trt.quantize.resume import Work, resumable
from dflash_trt.quantize.source import check_finite, find_amax, flat
from dflash_trt.quantize.ties import groups, input_scale, tie

SHARD_BYTES = 4 << 30
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot"}


@dataclass(frozen=True)
class Written:
    """What was written, for the report."""

    path: Path
    layers: tuple[Layer, ...]  # in the order of the plan
    bytes_before: int  # of all tensors
    bytes_after: int
    resumed: int  # shards that an earlier, interrupted run had finished


@dataclass(frozen=True)
class Unit:
    """Tensors that one step writes, into one shard: those of a linear, or one that is copied."""

    slots: tuple[Slot, ...]
    source: Linear | TensorRef

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def reads(self) -> tuple[TensorRef, ...]:
        if isinstance(self.source, TensorRef):
            return (self.source,)
        return (self.source.ref, self.source.scales) if self.source.scales else (self.source.ref,)


def write_checkpoint(
    plan: Plan,
    output: Path,
    amax: Mapping[str, Amax] | None,
    *,
    input_amax: float | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    finishing: Callable[[Written], None] = lambda written: None,
    progress: Progress = silent,
) -> Written:
    """Write `plan`'s checkpoint into the directory `output`, which appears when it is complete and checked.

    `amax` is what calibration found; without it, or where it is silent, the weights' own maxima count, and `input_amax`
    those of all inputs. Memory stays below a fixed amount and one tensor of block scales or one expert. Interrupted, it
    leaves what it finished; the same call goes on there. `finishing` is called when all that is left is to give the
    directory its name. Raises UserError for weights that are not finite, for inputs
    of unknown range and for an `output` that must not be replaced.
    """
    tied = tie(plan, amax, input_amax)
    shards = _distribute(_units(plan), shard_bytes)
    before = sum(ref.nbytes for units in shards.values() for unit in units for ref in unit.reads)
    fingerprint = _fingerprint(plan, tied, shards)
    with resumable(Path(output), fingerprint, source=plan.source, force=force) as work:
        layers, resumed = _write_shards(plan, tied, shards, work, progress, before)
        write_index(
            work.folder, {name: [slot for unit in units for slot in unit.slots] for name, units in shards.items()}
        )
        _copy_files(plan.source, work.folder)
        _write_configs(plan, work.folder, calibrated=amax is not None)
        progress("checking", 1)
        check_written(plan, work.folder)
        after = sum(unit.nbytes for units in shards.values() for unit in units)
        layers_in_order = tuple(layers[linear.module] for linear in plan.linears)
        written = Written(Path(output), layers_in_order, before, after, resumed)
        finishing(written)
    return written


def _units(plan: Plan) -> list[Unit]:
    """In the order of the source, so that it is read from one end to the other."""
    packed = [Unit(tuple(slots(linear, plan.preset.activations)), linear) for linear in plan.linears]
    copied = [Unit((Slot(ref.name, ref.dtype, ref.shape),), ref) for ref in plan.copied]
    return sorted(packed + copied, key=lambda unit: (unit.reads[0].file.name, unit.reads[0].offset, unit.slots[0].name))


def _distribute(units: list[Unit], shard_bytes: int) -> dict[str, list[Unit]]:
    """File name → its units, each file as full as `shard_bytes` allows."""
    shards: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return dict(zip(name_shards(len(shards)), shards, strict=True))


def _write_shards(
    plan: Plan, tied: Mapping[str, Amax], shards: Mapping[str, list[Unit]], work: Work, progress: Progress, total: int
) -> tuple[dict[str, Layer], int]:
    members = groups(plan)

    @functools.cache
    def group_amax(group: str) -> float:
        return max(find_amax(linear.ref) for linear in members[group])

    def scales(linear: Linear) -> Scales:
        known = tied[linear.module]
        own = 0.0 if linear.kind == "mxfp4" else group_amax(linear.group) if known.weight is None else known.weight
        of_input = None if known.input is None else input_scale(known.input)
        return Scales(global_scale(own), of_input, own, known.input, known.block)

    layers: dict[str, Layer] = {}
    read = resumed = 0
    for name, units in shards.items():
        if (facts := work.finished(name)) is None:
            facts = []
            with ShardWriter(work.folder / name, [slot for unit in units for slot in unit.slots]) as writer:
                for unit in units:
                    progress(f"writing {name}", read / max(total, 1))
                    source = unit.source
                    if isinstance(source, TensorRef):
                        _copy(source, writer)
                    else:
                        step = cast if source.kind == "mxfp4" else pack
                        facts.append(dataclasses.asdict(step(source, scales(source), writer)))
                    read += sum(ref.nbytes for ref in unit.reads)
            work.finish(name, facts)
        else:
            resumed += 1
            read += sum(ref.nbytes for unit in units for ref in unit.reads)
        layers |= {fact["module"]: Layer(**fact) for fact in facts}
    return layers, resumed


def _copy(ref: TensorRef, writer: ShardWriter) -> None:
    for piece in flat(ref):
        if ref.dtype in FLOATS:
            check_finite(piece, ref)
        writer.write(ref.name, piece)


def _copy_files(source: Path, folder: Path) -> None:
    """All that is not weights: tokenizer, templates, licence, code. Hidden folders are a download's or git's own."""
    for path in _files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _files(source: Path) -> Iterator[Path]:
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts[:-1])
        weights = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not hidden and not weights:
            yield path


def _write_configs(plan: Plan, folder: Path, calibrated: bool) -> None:
    nested, flat_form = quant_configs(plan.excluded, activations=plan.preset.activations, calibrated=calibrated)
    config = read_json(plan.source / "config.json") | {FLAT_KEY: flat_form}  # that of an MXFP4 source goes
    for name, content in ((NESTED_FILE, nested), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _fingerprint(plan: Plan, tied: Mapping[str, Amax], shards: Mapping[str, list[Unit]]) -> str:
    """Of all that the bytes of the shards depend on; the source's by headers, sizes and times alone."""
    digest = hashlib.sha256(f"{__version__} {plan.preset}".encode())
    for name, units in shards.items():
        digest.update(repr((name, [(unit.slots, unit.reads) for unit in units])).encode())
    for file in sorted({ref.file for units in shards.values() for unit in units for ref in unit.reads}):
        facts = file.stat()
        digest.update(repr((file, facts.st_size, facts.st_mtime_ns)).encode())
    for module, known in tied.items():
        digest.update(repr((module, known.weight, known.input)).encode())
        if known.block is not None:
            digest.update(known.block.tobytes())
    return digest.hexdigest()
