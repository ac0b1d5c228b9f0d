"""Preflight: what would go wrong with a deployment, told before anything touches a GPU.

A recipe is rendered first, so that a recipe and a YAML file written by hand take the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_trt.document import Keys, read_document
from dflash_trt.gpus import Gpus, parse_gpus
from dflash_trt.recipes import Loaded
from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.deployment import (
    ERROR,
    NOTE,
    SEVERITIES,
    WARNING,
    Deployment,
    Finding,
    Source,
    find_drafter,
    find_target,
)
from dflash_trt.trtllm.releases import judge, read_release, releases
from dflash_trt.trtllm.rules import RULES
from dflash_trt.trtllm.rules.table import Fault, Row
from dflash_trt.trtllm.serve_config import compose
from dflash_trt.trtllm.settings import SPECULATION, read_settings
from dflash_trt.trtllm.support import FIRST, older, trained_on

__all__ = [
    "ERROR", "KEYS", "NOTE", "WARNING", "Deployment", "Finding", "count", "deployment_of_config",
    "deployment_of_recipe", "preflight", "summary",
]  # fmt: skip

KEYS = Row(
    "DF000",
    ERROR,
    "keys and values are those of the release",
    why="TensorRT-LLM's schema is strict: what it does not know is refused, after minutes of importing",
    source="reference pages of the release (dflash_trt/trtllm/releases); extra keys: TensorRT-LLM PR 18901",
)
# Rules that say more about a key than the release's table does; the table's word on these keys is left out.
RESTATED = {
    "DF002": f"{SPECULATION}.decoding_type ",
    "DF004": f"{SPECULATION}.max_draft_len ",
    "DF006": "backend ",
    "DF025": "kv_cache_config.free_gpu_memory_fraction ",
}
ASSUMED = "B300"  # where no GPUs are named


def preflight(deployment: Deployment) -> list[Finding]:
    """All findings: errors first, in the order of the rules within."""
    found = [finding for rule in RULES.values() for finding in rule.findings(deployment)]
    errors = {finding.rule for finding in found if finding.severity == ERROR}
    restated = tuple(start for rule, start in RESTATED.items() if rule in errors)
    return sort([*_judged(deployment, restated), *found])


def sort(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule, finding.line or 0))


def count(findings: Iterable[Finding]) -> dict[str, int]:
    """Severity → how many."""
    listed = [finding.severity for finding in findings]
    return {severity: listed.count(severity) for severity in SEVERITIES}


def deployment_of_config(
    file: Path,
    gpus: Gpus | None = None,
    target: str | None = None,
    draft: str | None = None,
    release: str | None = None,
) -> Deployment:
    """A YAML for `trtllm-serve --config`. `target` and `draft`: directories or published names, else those of the file.

    Raises Problems for a file that is no YAML, UserError for a later release without a table.
    """
    document = read_document(Path(file))
    config, settings = document.values, read_settings(document.values)
    speculation = settings.speculation
    drafter = find_drafter(draft or (speculation.model if speculation else None))
    return Deployment(
        file=document.file,
        release=_release(release or releases()[-1]),
        gpus=gpus or parse_gpus(f"{ASSUMED}x{min(settings.world, 9999)}"),
        config=config,
        settings=settings,
        target=find_target(target or _text(config.get("model"))),
        drafter=drafter,
        line=document.line,
        trained_on=trained_on(drafter.name),
        environment=settings.environment,
    )


def deployment_of_recipe(
    loaded: Loaded,
    target: str | None = None,
    draft: str | None = None,
    gpus: Gpus | None = None,
    release: str | None = None,
) -> Deployment:
    """`target`, `draft`, `gpus` and `release` take the place of the recipe's own.

    Raises UserError for a recipe of another lane or one that is marked as unsupported, Problems for options that
    contradict its other keys.
    """
    recipe, folder = loaded.recipe, loaded.document.file.parent
    rendered = compose(loaded, target=_directory(target), draft=_directory(draft)).consistent()
    own_target, own_draft = (
        str(folder / one.path) if one.path else one.checkpoint for one in (recipe.target, recipe.drafter)
    )
    drafter = find_drafter(draft or own_draft, recipe.drafter.precision)
    settings = read_settings(rendered.config)
    return Deployment(
        file=loaded.document.file,
        release=_release(release or recipe.release or releases()[-1]),
        gpus=gpus or recipe.machine,
        config=rendered.config,
        settings=settings,
        target=find_target(target or own_target, recipe.target.precision),
        drafter=drafter,
        line=lambda keys: rendered.places.line(keys) or loaded.document.line(keys),
        goal=recipe.goal,
        trained_on=recipe.drafter.trained_on or trained_on(drafter.name),
        environment={**recipe.environment, **settings.environment},
    )


def summary(deployment: Deployment) -> dict[str, Any]:
    """What the findings rest on: the pair, and the memory of a GPU in bytes where it is known."""
    settings, arena, memory = deployment.settings, footprint.arena(deployment), footprint.memory(deployment)
    taken = arena.size(settings.batch) if arena and not footprint.pooled(settings) else 0
    sequence = footprint.sequence(deployment)
    return {
        "target": _about(deployment.target),
        "drafter": _about(deployment.drafter),
        "batch": settings.batch,
        "sequence": sequence,
        "draft_length": settings.speculation.draft_length if settings.speculation else None,
        "ranks": settings.world,
        "memory": {
            "card": deployment.gpus.card.memory,
            "weights": memory.weights if memory else None,
            "arena": arena.size(settings.batch) if arena else None,
            "arena_in_kv_cache": footprint.pooled(settings),
            "kv_cache": memory.cache(taken) if memory else None,
            "largest_batch": arena.largest_batch(memory.room) if arena and memory else None,
        },
    }


def _about(source: Source[Any]) -> Mapping[str, Any]:
    return {"name": source.name, "known": source.shape is not None, "precision": source.precision}


def _judged(deployment: Deployment, restated: tuple[str, ...]) -> list[Finding]:
    if deployment.release not in releases():
        return []  # DF005 speaks of it
    release = read_release(deployment.release)
    return [
        KEYS.finding(Fault(problem.what, problem.fix or ""), problem.line)
        for problem in judge(release, deployment.config, _Lines(deployment))
        if not problem.what.startswith(restated)
    ]


class _Lines:
    """A deployment's lines, as `judge` asks for them."""

    def __init__(self, deployment: Deployment):
        self._deployment = deployment

    def line(self, keys: Keys) -> int | None:
        return self._deployment.line(keys)


def _release(version: str) -> str:
    """One with a table, or one that is too old to have DFlash. Raises UserError for others."""
    return version if older(version, FIRST) else read_release(version).version


def _directory(name: str | None) -> Path | None:
    return Path(name) if name is not None and Path(name).exists() else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
