"""The shipped pair in NVFP4, nine heads over three key/value heads, split over three ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.trtllm.export import export_pair
from examples.smollm2.prepare import prepare
from tests.tiny import dequantized, load_tensors
from tests.trtllm.export.pairs import quantized
from tests.trtllm.export.reading import read_network

pytestmark = pytest.mark.slow

DRAFTER = Path(__file__).parents[3] / "examples/smollm2/drafter"
ENDS = {"model.embed_tokens.weight", "lm_head.weight"}  # the drafter's are copies, and this target's are one


def test_the_shipped_pair_is_read_back_as_it_was(tmp_path):
    halves = {"target": quantized(prepare(), tmp_path / "target"),
              "draft": quantized(DRAFTER, tmp_path / "draft", "nvfp4-mlp")}  # fmt: skip
    export_pair(halves["target"], halves["draft"], tmp_path / "out", tp=3)
    for role, path in halves.items():
        back = read_network(tmp_path / "out" / role).as_published("model." if role == "target" else "")
        want = load_tensors(dequantized(path))
        assert back.keys() - ENDS == want.keys() - ENDS
        assert all(np.array_equal(back[name], value.astype(np.float32)) for name, value in want.items())
