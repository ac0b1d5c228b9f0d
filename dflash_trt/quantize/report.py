"""What quantization did to each layer, as JSON and as a table for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_trt import __version__
from dflash_trt.checkpoint.config import read_json
from dflash_trt.checkpoint.nvfp4 import E2M1_MAX
from dflash_trt.errors import UserError
from dflash_trt.quantize.calibrate import DRAFT
from dflash_trt.quantize.pack import slots
from dflash_trt.quantize.plan import Plan
from dflash_trt.quantize.presets import GROUPS
from dflash_trt.quantize.write import Written
from dflash_trt.sizes import format_bytes

NAME = "quantization_report.json"
# Of a drafter readers slice these for keys and values of the context, or make plain layers of them.
SLICED = (*GROUPS["qkv_proj"], "fc")
CAST = ("blocks", "outside", "changed", "spread")  # facts of casts from MXFP4


def describe(
    role: str, plan: Plan, written: Written, *, calibration: Mapping[str, Any] | None, input_amax: float | None
) -> dict[str, Any]:
    """The record of one checkpoint. `error` is the relative root mean square error of a layer's weights, `outlier` its
    largest weight in units of their root mean square."""
    preset = plan.preset
    casts = {linear.module for linear in plan.linears if linear.kind == "mxfp4"}
    copied = {ref.name.removesuffix(".weight") for ref in plan.copied}
    layers = [asdict(layer) for layer in written.layers]
    for layer in layers:
        if layer["module"] not in casts:
            for key in CAST:
                del layer[key]
    return {
        "source": str(plan.source),
        "path": str(written.path),
        "preset": preset.name,
        "activations": preset.activations,
        "algorithm": preset.algorithm,
        "calibration": dict(calibration) if calibration else None,
        "input_amax": input_amax if preset.activations else None,
        "bytes_before": written.bytes_before,
        "bytes_after": written.bytes_after,
        "quantized_bytes_before": sum(ref.nbytes for line in plan.linears for ref in (line.ref, line.scales) if ref),
        "quantized_bytes_after": sum(slot.nbytes for line in plan.linears for slot in slots(line, preset.activations)),
        "layers": layers,
        "notes": list(_notes(role, plan, written)),
        "left_alone": [module for module in plan.excluded if module in copied],  # not the names of readers' own modules
    }


def _notes(role: str, plan: Plan, written: Written) -> Iterator[str]:
    """What the checkpoint's owner should know before somebody else reads it."""
    if plan.preset.needs_cuda:
        yield f"{plan.preset.name} was made by parts of ModelOpt that need CUDA and are untested here"
    sliced = {name for linear in plan.linears if (name := linear.module.rpartition(".")[2]) in SLICED}
    if role == DRAFT and sliced:
        yield (
            f"{', '.join(sorted(sliced))} packed: vLLM and TensorRT-LLM slice these weights and cannot load them "
            "packed; use nvfp4-mlp without --include fc for them; `convert` takes them"
        )
    if silent := [layer.module for layer in written.layers if layer.input_amax == 0]:
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        yield f"{silent[0]}{more} saw only zeros in calibration: ModelOpt's stand-in of {E2M1_MAX:g} is their amax"


def save_report(output: Path, records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Write the report beside the checkpoints; records of others that lie there stay."""
    file = output / NAME
    others: dict[str, Any] = {}
    if file.exists():
        try:
            kept = read_json(file).get("checkpoints", {})
            others = {role: record for role, record in kept.items() if (output / role).is_dir()}
        except (UserError, AttributeError):
            pass  # not ours, or damaged: the checkpoints that it told of are not
    report = {"version": __version__, "checkpoints": dict(sorted((others | dict(records)).items()))}
    partial = file.with_name(f".{NAME}.partial")
    partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(file)
    return report


def show_report(console: Console, records: Mapping[str, Mapping[str, Any]]) -> None:
    """One table a checkpoint, one row a kind of projection: of `outlier` (amax / rms) and `error` the worst layer's."""
    for role, record in records.items():
        kind = "W4A4" if record["activations"] else "W4A16"
        console.print(
            f"[green]✓[/] [bold]{record['path']}[/]: {role}, {record['preset']} ({kind})",
            highlight=False,
            soft_wrap=True,
        )
        if record["layers"]:
            console.print(_table(record))
        console.print(_sizes(record), highlight=False, soft_wrap=True)
        for note in record.get("notes", ()):
            console.print(f"  {escape(note)}", highlight=False, style="yellow", soft_wrap=True)
        if record["left_alone"]:
            left = ", ".join(_count(record["left_alone"]))
            console.print(f"  left alone: {left}", highlight=False, style="dim", soft_wrap=True)


def _table(record: Mapping[str, Any]) -> Table:
    layers = record["layers"]
    table = Table("", "layers", "amax", "outlier", "error")
    cast = any("blocks" in layer for layer in layers)
    if record["activations"]:
        table.add_column("input amax")
    if cast:
        table.add_column("blocks changed")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for kind in dict.fromkeys(_kind(layer["module"]) for layer in layers):
        rows = [layer for layer in layers if _kind(layer["module"]) == kind]
        cells = [kind, str(len(rows))]
        cells += [_range(rows, "amax"), _largest(rows, "outlier", ".1f"), _largest(rows, "error", ".1%")]
        if record["activations"]:
            cells.append(_range(rows, "input_amax"))
        if cast:
            changed, blocks = (sum(layer.get(key, 0) for layer in rows) for key in ("changed", "blocks"))
            cells.append(f"{changed:,} of {blocks:,}")
        table.add_row(*cells)
    return table


def _sizes(record: Mapping[str, Any]) -> str:
    before, after = record["bytes_before"], record["bytes_after"]
    text = f"  {format_bytes(before)} → {format_bytes(after)} ({_share(after, before)}"
    if record["layers"]:
        text += f"; quantized layers {_share(record['quantized_bytes_after'], record['quantized_bytes_before'])}"
    how = record["calibration"]
    if how:
        text += f"); calibrated on {how['texts']} texts, {how['tokens']:,} tokens"
    else:
        text += (
            f"); every input's amax set to {record['input_amax']:g}" if record["input_amax"] else "); not calibrated"
        )
    return text


def _kind(module: str) -> str:
    """A module's name with its numbers taken out: one row for all layers, and for all experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module).removeprefix("model.").removeprefix("layers.*.")


def _count(modules: Iterable[str]) -> list[str]:
    kinds: dict[str, int] = {}
    for module in modules:
        kinds[_kind(module)] = kinds.get(_kind(module), 0) + 1
    return [kind if count == 1 else f"{count} {kind}" for kind, count in sorted(kinds.items())]


def _range(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    low, high = (f"{bound(values):.3g}" if values else "-" for bound in (min, max))
    return low if low == high else f"{low}–{high}"


def _largest(rows: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return format(max(values), form) if values else "-"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
