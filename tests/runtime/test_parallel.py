"""However an engine is spread over ranks, under mpirun it gives the tokens of one rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dflash_trt.cli import app
from dflash_trt.engine import convert
from tests.packed import redeclare
from tests.runtime import mpi
from tests.tiny import edit_config, edit_tensors, make_pair

PROGRAM = Path(__file__).parent / "programs" / "answer.py"
LIMITS = {"max_batch": 2, "max_query": 16, "max_seq_len": 128}
LENGTH = 10
PROMPTS = [[97, 98, 97], np.random.default_rng(0).integers(97, 99, 40).tolist()]  # the window is 16
TWO_LAYERS = {"num_hidden_layers": 2}
TAPS = {"dflash_config.target_layer_ids": [0, 1]}
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2}

GRID = [(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8)]
MAPPINGS: dict[str, list[tuple[int, int]]] = {
    "gpt-oss": GRID,
    "gpt-oss-mxfp4": [(tp, ep) for tp, ep in GRID if tp <= ep or (tp, ep) == (4, 2)],  # experts of width 64 halve once
    "gpt-oss-nvfp4": [(1, 1), (4, 2), (8, 8)],
    "qwen3-odd-vocabulary": [(1, 1), (2, 1), (4, 1), (8, 1)],  # two key/value heads
    "llama": [(1, 1), (2, 1), (4, 1)],
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("pairs")

    def make(name: str, base: str, target: dict[str, object], draft: dict[str, object], **options) -> tuple[Path, Path]:
        (root / name).mkdir()
        return make_pair(root / name, base, target_config=target, draft_config=draft, **options)

    narrow = {**TWO_LAYERS, "intermediate_size": 64}
    mxfp4 = make("gpt-oss-mxfp4", "tiny-gptoss", narrow, TAPS, seed=6, words=2, experts="mxfp4")
    wide = WIDE | {"vocab_size": 251}
    return {
        "gpt-oss": make("gpt-oss", "tiny-gptoss", TWO_LAYERS, TAPS, seed=6, words=2),
        "gpt-oss-mxfp4": mxfp4,
        "gpt-oss-nvfp4": (weights_alone_in_nvfp4(mxfp4[0], root), mxfp4[1]),
        "qwen3-odd-vocabulary": make("qwen3", "tiny-qwen3", wide, WIDE | {"dflash_config.mask_token_id": 250}, seed=6),
        "llama": make("llama", "tiny-llama", {}, {}, seed=5, words=2),
    }


def weights_alone_in_nvfp4(target: Path, root: Path) -> Path:
    """The cast is exact, so these experts have the values of those in MXFP4."""
    options = ["--preset", "nvfp4-experts", "--input-amax", "448"]
    done = CliRunner().invoke(app, ["quantize", "--target", str(target), "-o", str(root / "nvfp4"), *options])
    assert done.exit_code == 0, done.output
    edit_tensors(root / "nvfp4" / "target", remove=["*_input_scale"])
    redeclare(root / "nvfp4" / "target", {"quant_algo": "W4A16_NVFP4"})
    edit_config(root / "nvfp4" / "target", remove=["quantization_config"])
    return root / "nvfp4" / "target"


@pytest.fixture(scope="module")
def answers(pairs, tmp_path_factory) -> Callable[[int], dict[tuple[str, int, int], list[list[list[int]]]]]:
    """Those of all engines of so many ranks, made in one job: with the drafter, and without."""
    root, made = tmp_path_factory.mktemp("engines"), {}

    def of(world: int) -> dict[tuple[str, int, int], list[list[list[int]]]]:
        if world not in made:
            keys = [(name, *m) for name, mappings in MAPPINGS.items() for m in mappings if max(m) == world]
            paths = [
                convert(*pairs[name], root / f"{name}-{tp}-{ep}", tp=tp, ep=ep, **LIMITS).path for name, tp, ep in keys
            ]
            done = mpi.run(world, sys.executable, PROGRAM, json.dumps(PROMPTS), LENGTH, *paths, timeout=400)
            assert done.returncode == 0, done.stderr
            made[world] = dict(zip(keys, map(json.loads, done.stdout.splitlines()), strict=True))
        return made[world]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_tokens_do_not_depend_on_the_ranks(world, answers):
    alone = answers(1)
    for (name, tp, ep), (drafted, plain) in answers(world).items():
        assert all(len(tokens) == LENGTH for tokens in plain)
        assert drafted == plain == alone[name, 1, 1][1], (name, tp, ep)
    assert alone["gpt-oss-nvfp4", 1, 1] == alone["gpt-oss-mxfp4", 1, 1]
