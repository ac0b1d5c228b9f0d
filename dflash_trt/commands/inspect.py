"""`dflash-trt inspect`: a card of a drafter, a target or an engine directory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dflash_trt.checkpoint import describe_checkpoint, read_header, read_tensors, scan
from dflash_trt.errors import UserError
from dflash_trt.sizes import format_bytes


def inspect(
    path: Path = typer.Argument(help="A drafter, a target or an engine directory."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a card."),
    scan_weights: bool = typer.Option(False, "--scan", help="Read all weights and report NaN and Inf."),
    block_size: int | None = typer.Option(None, "--block-size", help="For drafters whose config does not tell it."),
    memory: bool = typer.Option(
        False, "--memory", help="Of an engine directory: what each rank takes of a GPU, and how many sequences fit."
    ),
) -> None:
    """Show what a directory holds: sizes, attention, memory per sequence and problems. Exit code 2 if there are any."""
    card = _describe(path, block_size, memory)
    if scan_weights:
        card["problems"] += _scan(path)
    if as_json:
        typer.echo(json.dumps(card, indent=2))
    else:
        ranks = card.pop("memory", None)
        Console().print(_panel(card))
        if ranks:
            Console().print(_memory(ranks, card["limits"]["max_seq_len"]))
    if card["problems"]:
        raise typer.Exit(UserError.exit_code)


def _describe(path: Path, block_size: int | None, memory: bool) -> dict[str, Any]:
    if not _is_engine(path):
        if memory:
            fix = "convert it first; a checkpoint's card tells its KV cache a token"
            raise UserError("--memory is about engine directories", where=path, fix=fix)
        return describe_checkpoint(path, block_size)
    from dflash_trt.engine.card import describe_engine  # loads the compilers' bindings

    return describe_engine(path, memory)


def _is_engine(path: Path) -> bool:
    return (path / "manifest.json").exists()


def _scan(path: Path) -> list[str]:
    """What is not finite in a checkpoint, or in the weights an engine directory refers to."""
    try:
        files = map(read_header, sorted(path.glob("weights/*"))) if _is_engine(path) else [read_tensors(path)]
        refs = [ref for file in files for ref in file.values()]
    except UserError:
        return []  # the card already says so
    progress = track(refs, "Scanning", console=Console(stderr=True), transient=True)
    return [f"{found} — {ref.file}" for ref in progress if (found := scan(ref))]


def _panel(card: dict[str, Any]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in _rows(card):
        table.add_row(label, Text(text))
    for problem in card["problems"]:
        table.add_row("[red]problem[/]", Text(problem, style="red"))
    return Panel.fit(table, title=card["kind"], title_align="left", border_style="red" if card["problems"] else "green")


def _memory(ranks: list[dict[str, Any]], max_seq_len: int) -> Table:
    """One column for each run of ranks that take the same."""
    from dflash_trt.engine.memory import RESERVED

    runs = [list(run) for _, run in itertools.groupby(ranks, key=lambda rank: {**rank, "rank": None})]
    table = Table(title="memory of a rank", title_justify="left", caption_justify="left")
    table.caption = f"a slot: {max_seq_len} tokens and a step's columns; {RESERVED:.0%} of a card kept for all else"
    table.add_column()
    for run in runs:
        first, last = run[0]["rank"], run[-1]["rank"]
        table.add_column(f"ranks {first}-{last}" if last > first else f"rank {first}", justify="right")
    shown = [run[0] for run in runs]
    for kind in dict.fromkeys(kind for rank in shown for kind in rank["weights"]):
        table.add_row(kind, *(format_bytes(rank["weights"].get(kind, 0)) for rank in shown))
    table.add_row("all weights", *(format_bytes(sum(rank["weights"].values())) for rank in shown), style="bold")
    for role in shown[0]["cache_per_token"]:
        table.add_row(f"KV cache a token, {role}", *(format_bytes(rank["cache_per_token"][role]) for rank in shown))
    for role in shown[0]["cache_per_slot"]:
        table.add_row(f"KV cache a slot, {role}", *(format_bytes(rank["cache_per_slot"][role]) for rank in shown))
    for card in shown[0]["slots"]:
        table.add_row(f"slots on {card}", *(f"{rank['slots'][card]:,}" for rank in shown))
    return table


def _rows(card: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of a card, related facts side by side; what has no line of its own comes as `key: value`."""
    yield "path", card["path"]
    rest = {key: value for key, value in card.items() if key not in ("kind", "path", "problems")}
    if "attention" in rest:
        yield from _checkpoint_rows(rest)
    else:
        for role, nvfp4 in (rest.pop("nvfp4", None) or {}).items():
            if nvfp4:
                yield f"{role} NVFP4", _nvfp4(nvfp4)
        for key, value in rest.items():
            if key == "written_bytes":
                if value:
                    yield "written", _written(value)
                continue
            yield key.replace("_", " "), _text(value, in_bytes="bytes" in key)


def _written(files: dict[str, int]) -> str:
    """`8 files, rank0.safetensors …, of 165.9 MiB each`"""
    first, *others = files
    if not others or len({*files.values()}) > 1:
        return _text(files, in_bytes=True)
    return f"{len(files)} files, {first} …, of {format_bytes(files[first])} each"


def _checkpoint_rows(card: dict[str, Any]) -> Iterator[tuple[str, str]]:
    biases = [part for part in ("attention", "mlp") if card.get(f"{part}_bias")]
    stored = ", ".join(f"{format_bytes(count)} {dtype}" for dtype, count in card["stored_bytes"].items())
    files = f"{len(card['files'])} files" if len(card["files"]) > 1 else card["files"][0]
    yield "family", card["family"]
    yield "weights", f"{card['parameters']:,} parameters, {stored} in {files}"
    if card["nvfp4"] and card["nvfp4"]["weights"]:
        yield "NVFP4", _nvfp4(card["nvfp4"])
    for note in card["nvfp4"]["notes"] if card["nvfp4"] else ():
        yield "note", note
    yield "sizes", f"{card['layers']} layers, hidden {card['hidden']}, FFN {card['ffn']}, vocabulary {card['vocab']:,}"
    if experts := card.get("experts"):
        storage = {"float": "as floats"}.get(experts["storage"], f"in {experts['storage'].upper()}")
        of = f"{experts['count']} in each layer, {experts['top_k']} a token"
        yield "experts", f"{of}, {storage}, {format_bytes(experts['bytes'])}"
    sinks = ", with sinks" if card.get("sinks") else ""
    yield "heads", f"{card['heads']} query, {card['kv_heads']} key/value, {card['head_dim']} wide{sinks}"
    yield "biases", " and ".join(biases) or "none"
    yield "attention", "\n".join(_runs(card["attention"]))
    kind, *numbers = (
        _text({key: value}).removeprefix("kind ").replace("_", " ") for key, value in card["rope"].items()
    )
    yield "rope", f"{', '.join([kind, *numbers])}; up to {card['max_position']:,} positions"
    if "block_size" in card:
        drafts, depth = card["block_size"] - 1, card["num_target_layers"]
        yield "block", f"{card['block_size']}: the anchor and {drafts} drafts, mask token {card['mask_token_id']}"
        of = f" of {depth}" if depth else ""
        yield "taps", f"target layer outputs {_text(card['target_layer_ids'])} (from 0){of}"
    else:
        yield "head", "tied to the embedding" if card["tied_head"] else "its own"
        yield "ends at", f"token {_text(card['eos_ids'])}" if card["eos_ids"] else "no token"
    for key in ("embedding_scale", "logit_scale", "logit_softcap"):
        if key in card:
            yield key.replace("_", " "), _text(card[key])
    yield (
        "KV cache",
        "\n".join(
            f"{format_bytes(count)} a token, {format_bytes(count * card['max_position'])} a full sequence in {dtype}"
            for dtype, count in card["cache_bytes_per_token"].items()
        ),
    )


def _nvfp4(nvfp4: dict[str, Any]) -> str:
    """`NVFP4: 42 weights, 42 with activations, 121.8 KiB, 28.2 % of bfloat16`"""
    weights, activations = nvfp4["weights"], nvfp4["activations"]
    which = "with activations (W4A4)" if activations else "alone (W4A16)"
    if 0 < activations < weights:
        which = f"of them {activations} with activations"
    return f"{weights} weights {which}, {format_bytes(nvfp4['nbytes'])}, {nvfp4['of_bf16']:.1%} of bfloat16"


def _runs(values: list[str]) -> Iterator[str]:
    """One line for each run of equal values: "layers 0-3: window 2048, causal"."""
    for value, group in itertools.groupby(range(len(values)), key=values.__getitem__):
        layers = list(group)
        yield f"layers {layers[0]}-{layers[-1]}: {value}" if len(layers) > 1 else f"layer {layers[0]}: {value}"


def _text(value: Any, in_bytes: bool = False) -> str:
    match value:
        case dict():
            return ", ".join(f"{key} {_text(item, in_bytes)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(_text(item) for item in value) or "none"
        case bool():
            return "yes" if value else "no"
        case None:
            return "-"
        case int() if in_bytes:
            return format_bytes(value)
        case float():
            return f"{value:,.10g}"
    return str(value)
