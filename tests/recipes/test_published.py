"""Configs of published checkpoints: complete enough to reckon with, and each drafter fits the target it names."""

from __future__ import annotations

import pytest

from dflash_trt.errors import UserError
from dflash_trt.published import published, repositories

DRAFTERS = [name for name in repositories() if published(name).role == "drafter"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_fits_the_target_it_was_trained_for(name):
    found = published(name)
    drafter, target = found.drafter_shape(), published(found.target or "").shape()
    assert drafter.block_size and drafter.mask_token_id is not None and drafter.mask_token_id < (target.vocab or 0)
    assert drafter.hidden == target.hidden and drafter.vocab == target.vocab
    assert drafter.num_target_layers == target.layers and max(drafter.target_layer_ids or ()) < target.layers
    assert drafter.variant is None and not drafter.packed_qkv
    assert set(found.inferred) <= set(_dotted(found.config))


def test_unknown_repositories_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean z-lab/gpt-oss-120b-DFlash"):
        published("zlab/gpt-oss-120b-dflash")
    with pytest.raises(UserError, match="known: Qwen/Qwen3-4B"):
        published("nobody/at-all-12345")


def _dotted(config, prefix=""):
    for key, value in config.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
