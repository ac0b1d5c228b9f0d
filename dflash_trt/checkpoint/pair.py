"""Do this target and this drafter belong together?"""

from __future__ import annotations

from dflash_trt.checkpoint.draft import check_target_layer_ids
from dflash_trt.checkpoint.model import Draft, Pair, Target
from dflash_trt.errors import UserError


def pair(target: Target, draft: Draft | None) -> Pair:
    """Raises UserError naming the first thing on which the two checkpoints differ."""
    if draft is not None:
        ours, theirs = draft.config, target.config
        _same("hidden_size", ours.hidden, theirs.hidden, target, draft)
        _same("vocab_size", ours.vocab, theirs.vocab, target, draft)
        if ours.num_target_layers is not None:
            _same("num_target_layers", ours.num_target_layers, theirs.layers, target, draft)
        check_target_layer_ids(ours.target_layer_ids, theirs.layers, draft.path)
    return Pair(target, draft)


def _same(key: str, ours: int, theirs: int, target: Target, draft: Draft) -> None:
    if ours != theirs:
        raise UserError(
            f"{key} of the drafter is {ours}, the target has {theirs}",
            where=f"{draft.path} and {target.path}",
            fix="give the target this drafter was trained for",
        )
