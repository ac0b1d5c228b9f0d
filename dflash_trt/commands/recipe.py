"""`dflash-trt recipe`: list, show, render and launch the recipes of a pair on a machine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_trt.durable import reported
from dflash_trt.errors import UserError, one_line
from dflash_trt.recipes import Checkpoint, Loaded, Recipe, read_recipe, recipe_files
from dflash_trt.trtllm.folder import fill_folder, write_folder
from dflash_trt.trtllm.launch import LAUNCHERS, Folder, download, render_folder
from dflash_trt.trtllm.releases import read_release
from dflash_trt.trtllm.serve_config import Composed, compose

if TYPE_CHECKING:
    from dflash_trt.trtllm.deployment import Finding

Action = Literal["list", "show", "render", "launch"]
Launcher = Literal["plain", "mpirun", "slurm", "docker", "triton"]
# Which options belong to which action; the rest would be ignored, so they are refused.
OPTIONS = {
    "list": {"--json"},
    "show": {"--json", "--release"},
    "render": {"--json", "--release", "--target", "--draft", "--output", "--force"},
    "launch": {"--json", "--release", "--target", "--draft", "--launcher", "--server", "--host", "--port", "--dry-run"},
}  # fmt: skip
RUN = "dflash-trt-run."  # how common.sh knows a folder that it may remove


def recipe(
    action: Action = typer.Argument(help="list, show, render or launch."),
    name: str | None = typer.Argument(None, help="A recipe's name, or a file.", show_default=False),
    output: Path | None = typer.Option(None, "--output", "-o", help="render: the folder to make.", show_default=False),
    force: bool = typer.Option(False, "--force", help="render: overwrite the files of an earlier render."),
    launcher: Launcher | None = typer.Option(
        None, help="launch: what starts it; plain if not given.", show_default=False
    ),
    target: Path | None = typer.Option(None, help="The target's folder; /models/OWNER/NAME else.", show_default=False),
    draft: Path | None = typer.Option(None, help="The drafter's folder.", show_default=False),
    release: str | None = typer.Option(None, help="TensorRT-LLM's, in place of the recipe's.", show_default=False),
    server: str | None = typer.Option(
        None, help="launch: a command in place of trtllm-serve; it gets --host and --port.", show_default=False
    ),
    host: str | None = typer.Option(None, help="launch: where to listen; 127.0.0.1.", show_default=False),
    port: int | None = typer.Option(None, min=1, max=65535, help="launch: likewise; 8000.", show_default=False),
    dry_run: bool = typer.Option(False, "--dry-run", help="launch: print all files instead."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Work with recipes: a pair on a machine, for a goal. `launch` checks first, and starts nothing that would fail."""
    given = {
        "--output": output, "--force": force, "--launcher": launcher, "--target": target, "--draft": draft,
        "--release": release, "--server": server, "--host": host, "--port": port, "--dry-run": dry_run,
        "--json": as_json,
    }  # fmt: skip
    _check_options(action, name, {option for option, value in given.items() if value not in (None, False)})
    if action == "list":
        _list(as_json)
        return
    assert name is not None
    loaded = _read(name, release)
    if action == "show":
        _show(loaded, as_json)
    elif action == "render":
        assert output is not None
        _render(loaded, target, draft, output, force, as_json)
    else:
        if server is not None and not server.strip():
            raise UserError("no command", where="--server", fix="name what takes the place of trtllm-serve")
        environment = {"SERVER_COMMAND": server, "HOST": host, "PORT": None if port is None else str(port)}
        _launch(loaded, target, draft, launcher or "plain", environment, dry_run, as_json)


def _check_options(action: str, name: str | None, given: set[str]) -> None:
    if strange := sorted(given - OPTIONS[action]):
        fix = f"it takes {', '.join(sorted(OPTIONS[action]))}"
        raise UserError(f"{strange[0]} does nothing here", where=f"recipe {action}", fix=fix)
    if (name is None) != (action == "list"):
        what = "a name does nothing here" if action == "list" else "which recipe?"
        raise UserError(what, where=f"recipe {action}", fix="`dflash-trt recipe list` names them all")
    if action == "render" and "--output" not in given:
        raise UserError("where to?", where="recipe render", fix="pass --output with a folder to make")


def _read(name: str, release: str | None) -> Loaded:
    """With `release` in the place of the recipe's own, in its image's tag, too."""
    loaded = read_recipe(name)
    recipe = loaded.recipe
    if release is None:
        return loaded
    if recipe.lane == "serve":
        read_release(release)
    changes: dict[str, Any] = {"release": release}
    if recipe.container and recipe.release and recipe.container.image.endswith(f":{recipe.release}"):
        image = recipe.container.image.removesuffix(recipe.release) + release
        changes["container"] = recipe.container.model_copy(update={"image": image})
    return dataclasses.replace(loaded, recipe=recipe.model_copy(update=changes))


# -- list, show --------------------------------------------------------------------------------------------------------


def _list(as_json: bool) -> None:
    recipes = [read_recipe(name).recipe for name in recipe_files()]
    if as_json:
        typer.echo(json.dumps([_brief(recipe) for recipe in recipes], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("recipe", "goal", "GPUs", "batch", "K", "state"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("batch", "K") else "left")
    for recipe in recipes:
        state = "[red]not supported[/]" if recipe.unsupported else f"{recipe.lane} lane"
        numbers = (str(recipe.limits.batch), str(recipe.draft_length))
        table.add_row(f"[bold]{recipe.name}[/]", recipe.goal, str(recipe.machine), *numbers, state)
    console = Console(highlight=False)
    console.print(table)
    for recipe in recipes:
        if recipe.unsupported:
            console.print(f"\n[bold]{recipe.name}[/] is not supported: {escape(recipe.unsupported)}")


def _brief(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "description": recipe.description,
        "goal": recipe.goal,
        "gpus": str(recipe.machine),
        "lane": recipe.lane,
        "release": recipe.release,
        "target": recipe.target.checkpoint,
        "drafter": recipe.drafter.checkpoint,
        "unsupported": recipe.unsupported,
    }


def _show(loaded: Loaded, as_json: bool) -> None:
    recipe = loaded.recipe
    if as_json:
        values = recipe.model_dump() | {"gpus": str(recipe.gpus), "file": str(loaded.document.file)}
        typer.echo(json.dumps(_plain(values), indent=2, allow_nan=False))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in _facts(recipe, loaded.document.file):
        table.add_row(label, escape(text))
    Console(highlight=False).print(f"[bold]{recipe.name}[/]: {escape(recipe.description)}", table, sep="\n")


def _plain(value: Any) -> Any:
    """As JSON has it; `options` may hold what only YAML knows: .nan, dates, keys that are no text."""
    match value:
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list():
            return [_plain(inner) for inner in value]
        case float():
            return value if math.isfinite(value) else str(value)
        case None | bool() | int() | str():
            return value
    return str(value)


def _facts(recipe: Recipe, file: Path) -> list[tuple[str, str]]:
    parallel, limits, cache = recipe.parallel, recipe.limits, recipe.kv_cache
    attention = ", attention by requests" if parallel.attention_dp else ""
    facts = [
        ("file", str(file)),
        ("goal", f"{recipe.goal}, on {recipe.machine}"),
        ("lane", f"{recipe.lane}" + (f", TensorRT-LLM {recipe.release}" if recipe.release else "")),
        ("target", _checkpoint(recipe.target)),
        ("drafter", f"{_checkpoint(recipe.drafter)}, {recipe.drafter.attention_backend} attention"),
        ("drafts", f"K {recipe.draft_length}, of blocks of {recipe.block_size}"),
        ("parallel", f"tp {parallel.tp}, ep {parallel.ep}, pp {parallel.pp}{attention}"),
        ("limits", f"{limits.batch} requests, {limits.sequence:,} tokens each, {limits.tokens:,} a step"),
        ("KV cache", f"{cache.fraction:.0%} of what is free, {cache.dtype}, prefix reuse {cache.prefix_reuse}".lower()),
    ]
    if recipe.unsupported:
        facts.append(("not supported", recipe.unsupported))
    return [*facts, *(("note", note) for note in recipe.notes)]


def _checkpoint(checkpoint: Checkpoint) -> str:
    revision = f" at {checkpoint.revision}" if checkpoint.revision else ", newest revision"
    return f"{checkpoint.checkpoint}{revision}, {checkpoint.precision}"


# -- render, launch ----------------------------------------------------------------------------------------------------


def _render(loaded: Loaded, target: Path | None, draft: Path | None, output: Path, force: bool, as_json: bool) -> None:
    folder = render_folder(loaded, target=target, draft=draft)
    write_folder(folder.files, output, force=force)
    if as_json:
        typer.echo(json.dumps({"path": str(output.absolute()), "files": sorted(folder.files)}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]✓[/] [bold]{escape(str(output))}[/]: {folder.recipe.name}, {len(folder.files)} files")
    for script in LAUNCHERS.values() if folder.recipe.nodes == 1 else (LAUNCHERS["slurm"],):
        start = "sbatch" if script.endswith(".sbatch") else "bash"
        console.print(f"  {start} {shlex.quote(str(output / script))}", markup=False)


def _launch(
    loaded: Loaded,
    target: Path | None,
    draft: Path | None,
    launcher: str,
    environment: dict[str, str | None],
    dry_run: bool,
    as_json: bool,
) -> None:
    from dflash_trt.trtllm.doctor import doctor, look  # with numpy, which the other actions can do without
    from dflash_trt.trtllm.preflight import ERROR, WARNING, deployment_of_recipe, preflight

    composed = compose(loaded, target=target, draft=draft)
    deployment = deployment_of_recipe(loaded, _named(target), _named(draft))
    findings = preflight(deployment)
    reasons = [_sentence(finding) for finding in findings if finding.severity == ERROR]
    standing_in = environment["SERVER_COMMAND"] or os.environ.get("SERVER_COMMAND")
    if not dry_run:
        reasons += _unsuited(loaded.recipe, launcher)
    if not standing_in and not dry_run:
        reasons += _missing(composed)
        said = environment["PORT"] or os.environ.get("PORT", "")
        port = int(said) if said.isdecimal() else 8000  # the launcher refuses what is no port
        # What the machine lacks is for the launcher to refuse: the container may have it.
        findings += doctor(look(deployment, port, os.environ), deployment)
    for finding in findings:
        if finding.severity == WARNING or (finding.severity == ERROR and _sentence(finding) not in reasons):
            print(f"warning: {_sentence(finding)}", file=sys.stderr)
    if reasons:
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise UserError(f"{loaded.recipe.name} would fail, {len(reasons)} reason{'s' * (len(reasons) > 1)}:{lines}")
    folder = render_folder(loaded, target=target, draft=draft)
    if dry_run:
        _print_files(folder, launcher, as_json)
        return
    environment |= {"TARGET": str(composed.target), "DRAFT": str(composed.draft)}  # which were checked
    _start(folder, launcher, {key: value for key, value in environment.items() if value is not None})


def _named(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def _sentence(finding: Finding) -> str:
    place = f"line {finding.line}: " if finding.line else ""
    return f"{finding.rule} {place}{one_line(finding.what)}" + (f" — {finding.fix}" if finding.fix else "")


def _unsuited(recipe: Recipe, launcher: str) -> list[str]:
    """What only a folder that stays can do."""
    render = f"dflash-trt recipe render {recipe.name} --output DIR"
    if launcher == "triton":
        return [f"NVIDIA's model.py has to be copied into the folder first — --launcher triton — {render}"]
    job = "SLURM_JOB_ID" in os.environ
    if recipe.nodes > 1 or (launcher == "slurm" and not job):
        what = f"{recipe.nodes} nodes" if recipe.nodes > 1 else "outside of a job"
        fix = f"{render}, and there: sbatch slurm.sbatch"
        return [f"{what}: a folder is needed that Slurm sees — --launcher {launcher} — {fix}"]
    return []


def _missing(composed: Composed) -> list[str]:
    recipe = composed.recipe
    return [
        f"no such folder — {path} — pass {option}, or: {download(checkpoint, path)}"
        for option, path, checkpoint in (
            ("--target", composed.target, recipe.target),
            ("--draft", composed.draft, recipe.drafter),
        )
        if not path.is_dir()
    ]


def _print_files(folder: Folder, launcher: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"start": LAUNCHERS[launcher], "files": folder.files}, indent=2))
        return
    for name, text in folder.files.items():
        typer.echo(f"==> {name} <==\n{text}")
    typer.echo(f"would run: bash {LAUNCHERS[launcher]}")


def _start(folder: Folder, launcher: str, environment: dict[str, str]) -> NoReturn:
    """Become the launcher, so that signals and the exit code are its own. It removes what is made here when it ends."""
    run = Path(tempfile.mkdtemp(prefix=RUN))
    try:
        with reported(run):
            fill_folder(folder.files, run / "recipe")
            sys.stdout.flush()
            sys.stderr.flush()
            words = ["bash", str(run / "recipe" / LAUNCHERS[launcher])]
            os.execvpe("bash", words, os.environ | environment | {"DFLASH_TRT_RUN": str(run)})
    finally:
        shutil.rmtree(run, ignore_errors=True)
