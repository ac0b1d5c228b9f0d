"""Calibration: one pass of the text through the target, and through the drafter on the target's features.

A drafter has no input of its own: its context is what the target thinks of a text, its block the embedding of one
token and of masks. So the pair runs as it does when it serves, over a text that is known: at sampled anchors the
drafter gets the features before the anchor and a block that starts with the anchor's token. Both models are calibrated
in that one pass; nothing of the text is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint import Draft, read_tensors
from dflash_trt.checkpoint.stack import FLOATS
from dflash_trt.errors import UserError
from dflash_trt.progress import Progress, silent
from dflash_trt.quantize.modelopt import Probe, load, measure, probe
from dflash_trt.quantize.plan import Amax, Plan
from dflash_trt.quantize.source import find_amax
from dflash_trt.quantize.target_model import TargetModel, check_fits

ANCHORS = 32  # of a text: with blocks of 16 as many block rows as a text of 512 tokens has context rows
TARGET, DRAFT = "target", "draft"


def needs_calibration(plan: Plan) -> bool:
    """Weights alone tell their own amax."""
    return plan.preset.activations or plan.preset.algorithm != "max"


def calibrate(
    plans: Mapping[str, Plan],
    target: Path,
    draft: Draft | None,
    texts: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Models, dict[str, dict[str, Amax]]]:
    """The models as ModelOpt left them, and the amax of every module of the plans, by role ("target", "draft").

    `draft` is needed if its plan is there. Plans whose presets share an algorithm are calibrated in one pass. Raises
    UserError for a pair that does not fit, Failure for modules that no text reached.
    """
    if draft:
        check_fits(draft.config, target)
    _check_finite(plans, target, progress)
    torch = load("torch")
    progress("loading the models", 0)
    pair = Models(target, draft if DRAFT in plans else None, seed)
    if (largest := max(max(ids) for ids in texts)) >= pair.target.vocab:
        what = f"the tokenizer makes token {largest}, the embedding has {pair.target.vocab} rows"
        raise UserError(what, where=target, fix="give the target with its own tokenizer")
    found = {}
    for passed in _passes(plans):
        planned = torch.nn.ModuleDict({role: pair.models[role] for role in passed})
        names = {name for name, _ in planned.named_modules()}
        probes = [p for role, plan in passed.items() for p in _probes(role, plan, names)]
        head = any(linear.module.endswith("lm_head") for plan in passed.values() for linear in plan.linears)

        def forward(drafts: bool = DRAFT in passed, head: bool = head) -> None:
            pair.begin()
            for number, ids in enumerate(texts):
                progress("calibrating", number / len(texts))
                pair.read(torch.tensor(ids), head=head, drafts=drafts)

        amaxes = iter(measure(planned, probes, next(iter(passed.values())).preset.algorithm, forward))
        for role, plan in passed.items():
            found[role] = _tie_inputs(plan, {linear.module: next(amaxes) for linear in plan.linears})
    return pair, found


def _passes(plans: Mapping[str, Plan]) -> list[dict[str, Plan]]:
    """Plans by algorithm, of which ModelOpt takes one at a time. The drafter's comes first: it reads the features of a
    target that nothing has been done to."""
    passes: dict[str, dict[str, Plan]] = {}
    for role, plan in sorted(plans.items()):
        passes.setdefault(plan.preset.algorithm, {})[role] = plan
    return list(passes.values())


class Models:
    """The models at work on one text after the other."""

    def __init__(self, target: Path, draft: Draft | None, seed: int):
        self.target, self.draft, self._seed = TargetModel(target), None, seed
        self.models: dict[str, Any] = {TARGET: self.target.model}
        self._taps: tuple[int, ...] = ()
        if draft:
            from dflash_trt.quantize.draft_model import load_draft_model  # imports torch

            self.draft = self.models[DRAFT] = load_draft_model(draft, self.target.device)
            self._taps = draft.config.target_layer_ids

    def begin(self) -> None:
        """Every pass over the texts samples the same anchors."""
        self._random = load("torch").Generator().manual_seed(self._seed % 2**64)

    def read(self, ids: Any, *, head: bool, drafts: bool) -> None:
        features = self.target.read(ids, self._taps if drafts else (), head=head)
        if self.draft is None or not drafts or len(ids) < 2:
            return
        torch = load("torch")
        config, dtype = self.draft.config, self.draft.fc.weight.dtype
        anchors = 1 + torch.randperm(len(ids) - 1, generator=self._random)[:ANCHORS]
        masks = torch.full((len(anchors), config.block_size - 1), config.mask_token_id)
        block = self.target.embed(torch.cat([ids[anchors][:, None], masks], dim=1))
        with torch.no_grad():
            self.draft(features.to(dtype), anchors.to(features.device), block.to(dtype))


def _probes(role: str, plan: Plan, modules: set[str]) -> list[Probe]:
    return [
        probe(
            modules,
            linear.module,
            f"{role}.{_module_name(role, linear.module)}",
            weight=linear.kind != "mxfp4",  # those are cast, not quantized
            input=plan.preset.activations,
            rows=linear.shape[1],
        )
        for linear in plan.linears
    ]


def _module_name(role: str, module: str) -> str:
    """The file's spelling → that of the model; both exist with and without the prefix."""
    bare = module.removeprefix("model.")
    return bare if role == DRAFT or bare == "lm_head" else f"model.{bare}"


def _tie_inputs(plan: Plan, amaxes: dict[str, Amax]) -> dict[str, Amax]:
    """ModelOpt ties the weights of a group; its members have one input too, which k_proj and v_proj of a drafter see
    more of than q_proj."""
    largest: dict[str, float] = {}
    for linear in plan.linears:
        if (seen := amaxes[linear.module].input) is not None:
            largest[linear.group] = max(seen, largest.get(linear.group, 0.0))
    return {linear.module: replace(amaxes[linear.module], input=largest.get(linear.group)) for linear in plan.linears}


def _check_finite(plans: Mapping[str, Plan], target: Path, progress: Progress) -> None:
    """NaN and Inf are told by the tensor's name here; ModelOpt would stop at an assertion."""
    refs = [ref for plan in plans.values() for ref in (*(linear.ref for linear in plan.linears), *plan.copied)]
    if TARGET not in plans:
        refs += read_tensors(target).values()
    for number, ref in enumerate(refs):
        progress("checking weights", number / len(refs))
        if ref.dtype in FLOATS:
            find_amax(ref)
