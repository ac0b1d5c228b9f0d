"""A recipe as a folder of files that an operator can read, keep and start: settings, launchers, Triton's repository.

    config.yaml            what `trtllm-serve --config` reads
    settings.sh            where the checkpoints lie, where to listen; the one script that differs between recipes
    serve.sh mpirun.sh slurm.sbatch docker.sh triton.sh    one for each way to start it
    server.sh common.sh    what they share
    triton/                a model repository for Triton's llmapi backend, without NVIDIA's own files
    README.md

The scripts lie in `scripts/`, as they are; slurm.sbatch gets its head filled in.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.recipes import Checkpoint, Loaded, Recipe
from dflash_trt.trtllm.llmapi import model_yaml
from dflash_trt.trtllm.serve_config import Rendered, render_config

SCRIPTS = Path(__file__).with_name("scripts")
LAUNCHERS = {
    "plain": "serve.sh",
    "mpirun": "mpirun.sh",
    "slurm": "slurm.sbatch",
    "docker": "docker.sh",
    "triton": "triton.sh",
}
SHARED = ("server.sh", "common.sh")
GRACE = 60  # seconds a server has to end
START_TIMEOUT = 3600  # seconds until it must answer; large checkpoints come over networks


@dataclass(frozen=True)
class Folder:
    """A recipe rendered: relative path → text."""

    recipe: Recipe
    rendered: Rendered
    files: dict[str, str]


def render_folder(loaded: Loaded, *, target: Path | None = None, draft: Path | None = None) -> Folder:
    """All files of a recipe; raises as `render_config`."""
    rendered = render_config(loaded, target=target, draft=draft)
    recipe = loaded.recipe
    files = {"config.yaml": rendered.text, "settings.sh": _settings(recipe, rendered)}
    for name in (*LAUNCHERS.values(), *SHARED):
        files[name] = (SCRIPTS / name).read_text(encoding="utf-8")
    head = {"NAME": recipe.name, "NODES": str(recipe.nodes), "GPUS": str(recipe.gpus.count)}
    for key, value in head.items():
        files["slurm.sbatch"] = files["slurm.sbatch"].replace(f"@{key}@", value)
    files["triton/tensorrt_llm/config.pbtxt"] = (SCRIPTS / "config.pbtxt").read_text(encoding="utf-8")
    files["triton/tensorrt_llm/1/model.yaml"] = model_yaml(rendered)
    files["README.md"] = _readme(recipe, rendered)
    return Folder(recipe, rendered, files)


def download(checkpoint: Checkpoint, folder: Path) -> str:
    """The command that puts a checkpoint where it is looked for."""
    words = ["hf", "download", checkpoint.checkpoint]
    if checkpoint.revision:
        words += ["--revision", checkpoint.revision]
    return shlex.join([*words, "--local-dir", str(folder)])


MARK = "# Made by `dflash-trt recipe render"  # how a folder is known as ours
SETTINGS = """\
# shellcheck shell=bash disable=SC2034
{mark} {name}`. What has a `:-` may be set in the environment instead.
NAME={name}
RELEASE={release} # of TensorRT-LLM
NODES={nodes}
WORLD={world} # ranks, one a GPU

TARGET=${{TARGET:-{target}}}
DRAFT=${{DRAFT:-{draft}}}
RENDERED_DRAFT={draft} # the one in config.yaml
TARGET_DOWNLOAD={target_download}
DRAFT_DOWNLOAD={draft_download}

HOST=${{HOST:-127.0.0.1}}
PORT=${{PORT:-8000}}
GRACE=${{GRACE:-{grace}}}                   # seconds that the server has to end
START_TIMEOUT=${{START_TIMEOUT:-{start_timeout}}} # seconds within which it must answer
STOP_SIGNAL=${{STOP_SIGNAL:-TERM}}      # what it is asked to end with
IMAGE=${{IMAGE:-{image}}}

# Relative paths count from where it was started.
STARTED_IN=${{STARTED_IN:-$PWD}}
[[ $TARGET == /* ]] || TARGET=$STARTED_IN/$TARGET
[[ $DRAFT == /* ]] || DRAFT=$STARTED_IN/$DRAFT
export TARGET DRAFT HOST PORT STARTED_IN

# Of the server's processes.
ENVIRONMENT=({environment})
"""


def _settings(recipe: Recipe, rendered: Rendered) -> str:
    quote = shlex.quote
    image = recipe.container.image if recipe.container else ""
    text = SETTINGS.format(
        mark=MARK,
        name=recipe.name,
        release=quote(recipe.release or ""),
        nodes=recipe.nodes,
        world=recipe.machine.total,
        target=quote(str(rendered.target)),
        draft=quote(str(rendered.draft)),
        target_download=quote(download(recipe.target, rendered.target)),
        draft_download=quote(download(recipe.drafter, rendered.draft)),
        grace=GRACE,
        start_timeout=START_TIMEOUT,
        image=quote(image) if image else "",
        environment=" ".join(recipe.environment),
    )
    return text + "".join(f"export {name}=${{{name}:-{quote(value)}}}\n" for name, value in recipe.environment.items())


README = """\
# {name}

{description}, on {machine}, by TensorRT-LLM {release}.
Made by `dflash-trt recipe render {name}`: change the recipe, not these files. They were never run with
TensorRT-LLM or a GPU; the launchers were, with a server on a CPU in its place.

| start | with |
|---|---|
| `bash serve.sh` | TensorRT-LLM installed on one node |
| `bash mpirun.sh` | the same under mpirun; `RANKS={world}` for a rank a GPU |
| `sbatch slurm.sbatch` | Slurm, {nodes} |
| `bash docker.sh` | NVIDIA's container |
| `bash triton.sh` | Triton Inference Server, after NVIDIA's two files were copied (its head says how) |

Each says what is missing and starts nothing, or says when `/health` answers. SIGTERM, Ctrl-C or the end of its
terminal stop it; its exit code is the server's. Set in the environment, or in `settings.sh`:

| variable | |
|---|---|
| `TARGET`, `DRAFT` | folders of the checkpoints: `{target}`, `{draft}` |
| `HOST`, `PORT` | where to listen: 127.0.0.1, 8000. No keys are asked for |
| `GRACE` | seconds the server has to end: {grace} |
| `START_TIMEOUT` | seconds within which it must answer: {start_timeout} |
| `IMAGE` | of `docker.sh`: the full name, with its registry, of {image} |
| `SERVER_COMMAND` | of the first three: another server in the place of `trtllm-serve`; it gets `--host` and `--port` |
| `STOP_SIGNAL` | what the server is asked to end with: TERM |

    {target_download}
    {draft_download}

Ask it:

    curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{{"model": "{target}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
"""


def _readme(recipe: Recipe, rendered: Rendered) -> str:
    text = README.format(
        name=recipe.name,
        description=recipe.description,
        machine=recipe.machine,
        release=recipe.release,
        world=recipe.machine.total,
        nodes="one node" if recipe.nodes == 1 else f"{recipe.nodes} nodes",
        target=rendered.target,
        draft=rendered.draft,
        grace=GRACE,
        start_timeout=START_TIMEOUT,
        image=recipe.container.image if recipe.container else f"an image of TensorRT-LLM {recipe.release}",
        target_download=download(recipe.target, rendered.target),
        draft_download=download(recipe.drafter, rendered.draft),
    )
    return text + "".join(_notes(recipe))


def _notes(recipe: Recipe) -> Iterator[str]:
    if recipe.notes:
        yield "\n## Notes\n\n"
    for note in recipe.notes:
        yield f"* {note}\n"
