"""Every spelling of rotary parameters, and what is refused instead of guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint import Rope
from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.errors import UserError

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope(**keys: object) -> Rope:
    return read_rope(Config(Path("config.json"), keys), max_position=131072)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1000000}, Rope(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, Rope(1e6)),
        ({"rope_theta": 10000, "rope_parameters": None}, Rope(1e4)),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, Rope(1e7)),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 10000}, Rope(1e4)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(1e4, "linear", 2.0)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_type": "default"}}, Rope(1e4)),
        ({"rope_theta": 150000, "rope_scaling": YARN}, Rope(150000.0, "yarn", 32.0, 4096)),
        ({"rope_parameters": YARN | {"rope_theta": 150000}}, Rope(150000.0, "yarn", 32.0, 4096)),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN | {"truncate": False}, "rope_parameters": YARN},
            Rope(1e4, "yarn", 32.0, 4096, truncate=False),
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4}}, Rope(1e4, "yarn", 4.0, 131072)),
        (
            {
                "rope_theta": 1e4,
                "original_max_position_embeddings": 8192,
                "rope_scaling": {"type": "yarn", "factor": 4},
            },
            Rope(1e4, "yarn", 4.0, 8192),
        ),
        (
            {"rope_theta": 5e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}},
            Rope(5e4, "yarn", 32.0, 4096, beta_fast=16.0, mscale=1.0, mscale_all_dim=0.5),
        ),
        (
            {"rope_theta": 5e4, "rope_scaling": YARN | {"attention_factor": 1.2, "beta_slow": 2.0}},
            Rope(5e4, "yarn", 32.0, 4096, attention_factor=1.2, beta_slow=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, Rope(5e5, "llama3", 8.0, 8192)),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}},
            Rope(1e6),
        ),
    ],
)
def test_rope_is_read_from_every_placement(keys, expected):
    assert rope(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1}, "rope_theta is 1"),
        ({"rope_theta": 10**400}, "not a positive number"),
        ({"rope_theta": float("nan")}, "not a positive number"),
        ({"rope_theta": "1e6"}, "not a positive number"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "1e+06 at top level but 10000 in the rope"),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "original_max_position_embeddings": 8192},
            "8192 at top level but 4096",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": YARN | {"factor": 4.0}},
            "rope_parameters.factor",
        ),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"type": "linear"}}, "yarn beside type linear"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_theta": 1e6, "rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_theta": 1e6, "rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section is not supported"),
        ({"rope_theta": 1e6, "rope_scaling": []}, "rope_scaling is [], not an object"),
        ({"rope_theta": 1e6, "rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "is not below"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "differs between full_attention and sliding_attention: not supported",
        ),
    ],
)
def test_rope_that_is_missing_contradictory_or_unknown_is_refused(keys, words):
    with pytest.raises(UserError) as error:
        rope(**keys)
    assert words in str(error.value)
