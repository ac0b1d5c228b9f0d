"""Rotary parameters from either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoint.config import Config, Default
from dflash_trt.checkpoint.model import Rope

KINDS = ("default", "linear", "yarn", "llama3")
READ = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor",
    "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
    "low_freq_factor", "high_freq_factor",
}  # fmt: skip


def read_rope(
    config: Config, max_position: int, default_theta: float | None = None, default: Mapping[str, Any] = {}
) -> Rope:
    """Defaults are those of transformers 5 (`modeling_rope_utils.py`); `default` is the block of configs without one.

    Raises UserError where two keys disagree.
    """
    block = _block(config)
    if not block.values:
        block = Config(config.file, dict(default))
    if unread := sorted(block.values.keys() - READ):
        raise config.bad(f"rope key {unread[0]}", "is not supported")
    if block.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1:
        raise config.bad("partial_rotary_factor", "other than 1 is not supported")
    theta = _either(config, block, "rope_theta", default_theta)
    if theta is None or theta <= 1:
        raise config.bad("rope_theta", "is missing" if theta is None else f"is {theta:g}, not above 1")
    if "rope_type" not in block and "type" not in block and "factor" in block:
        raise config.bad("rope_type", "is missing beside a rope factor", f"one of {', '.join(KINDS)}")
    legacy = block.one_of("type", KINDS, "default")
    kind = block.one_of("rope_type", KINDS, legacy)
    if "type" in block and legacy != kind:
        raise config.bad("rope_type", f"is {kind} beside type {legacy}", "keep one")
    if kind == "default":
        return Rope(theta)
    factor = block.number("factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    original = int(_either(config, block, "original_max_position_embeddings", max_position))
    if kind == "llama3":
        low, high = block.number("low_freq_factor"), block.number("high_freq_factor")
        if low >= high:
            raise config.bad("low_freq_factor", f"{low} is not below high_freq_factor {high}")
        return Rope(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=block.number("beta_fast", 32.0),
        beta_slow=block.number("beta_slow", 1.0),
        truncate=block.flag("truncate", True),
        attention_factor=block.number("attention_factor", None),
        mscale=block.number("mscale", None),
        mscale_all_dim=block.number("mscale_all_dim", None),
    )


def _block(config: Config) -> Config:
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if new.values and all(isinstance(value, dict) for value in new.values.values()):  # one block per layer type
        blocks = list(new.values.values())
        if any(block != blocks[0] for block in blocks):
            raise config.bad("rope_parameters", f"differs between {' and '.join(new.values)}: not supported")
        new = Config(config.file, blocks[0])
    if disagree := sorted(k for k in old.values.keys() & new.values.keys() if old.values[k] != new.values[k]):
        key = disagree[0]
        raise config.bad(
            f"rope_scaling.{key}",
            f"is {old.values[key]!r} but rope_parameters.{key} is {new.values[key]!r}",
            "keep one",
        )
    return Config(config.file, old.values | new.values)


def _either(config: Config, block: Config, key: str, default: Default) -> float | Default:
    """A number that may stand at top level or in the rope block."""
    inner, outer = block.number(key, None), config.number(key, None)
    if inner and outer and inner != outer:
        raise config.bad(key, f"is {outer:g} at top level but {inner:g} in the rope block", "keep one")
    return inner or outer or default
