"""gpt-oss-120b at its true shapes, with holes for data: what a conversion for eight ranks costs and refers to."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt.checkpoint import read_header
from dflash_trt.engine import open_engine
from dflash_trt.engine.memory import measure
from tests.checkpoint.sparse import GPT_OSS_120B, write_draft, write_gpt_oss

CONFIGS = Path(__file__).parents[1] / "checkpoint" / "configs"
RANKS = 8
# Converts in a process of its own and tells its peak RSS in bytes.
CONVERT = """
import sys
from pathlib import Path
from dflash_trt.engine import convert
from dflash_trt.measure.memory import own_peak
target, draft, output = map(Path, sys.argv[1:])
convert(target, draft, output, tp=8, ep=8)
print(own_peak())
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(checkpoints, engine, seconds, peak RSS in bytes)"""
    root = tmp_path_factory.mktemp("full")
    target = write_gpt_oss(root / "gpt-oss-120b", GPT_OSS_120B, files=15)
    config = json.loads((CONFIGS / "gpt-oss-120b.json").read_text())["config"]
    draft = write_draft(root / "gpt-oss-120b-DFlash", config)
    started = time.perf_counter()
    command = [sys.executable, "-c", CONVERT, str(target), str(draft), str(root / "engine")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return (target, draft), open_engine(root / "engine"), time.perf_counter() - started, int(said)


@pytest.mark.slow
def test_it_is_quick_and_small(converted):
    checkpoints, engine, seconds, peak = converted
    total = sum(file.stat().st_size for path in checkpoints for file in path.glob("*.safetensors"))
    assert total > 62e9
    assert seconds < 180
    assert peak < 1.5e9
    assert len(engine.manifest.written) == RANKS
    assert sum(engine.manifest.written.values()) < 0.03 * total


@pytest.mark.slow
def test_every_byte_is_referred_to_by_the_ranks_that_need_it(converted):
    """Counted over the byte ranges in the ranks' own graphs; what the ranks were given in files is counted by size."""
    checkpoints, engine, *_ = converted
    links = {f"weights/{name.partition('/')[2]}": Path(file.path) for name, file in engine.manifest.weights.items()}
    ranges: Counter[tuple[Path, int, int]] = Counter()
    written: Counter[str] = Counter()
    for rank in range(RANKS):
        for value in ir.load(engine.graph(rank=rank, cpu=False)).graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and str(tensor.location) in links:
                ranges[links[str(tensor.location)], tensor.offset, tensor.length] += 1
            elif isinstance(tensor, ir.ExternalTensor):
                written[value.name] += tensor.length
    for role, path in zip(("target", "draft"), checkpoints, strict=True):
        for file in sorted(path.glob("*.safetensors")):
            here = np.array([(*where[1:], count) for where, count in ranges.items() if where[0] == file.resolve()])
            for name, ref in read_header(file).items():
                if f"{role}.{name}" in written:  # columns of row-parallel weights
                    assert written[f"{role}.{name}"] == ref.nbytes, name
                    continue
                inside = here[(here[:, 0] >= ref.offset) & (here[:, 0] < ref.offset + ref.nbytes)]
                inside = inside[np.argsort(inside[:, 0])]
                shared = name.endswith(("norm.weight", "o_proj.bias")) or "router" in name or name == "fc.weight"
                assert (inside[:, 2] == (RANKS if shared else 1)).all(), name
                assert len(inside) == (1 if shared else RANKS), name
                starts, ends = inside[:, 0], inside[:, 0] + inside[:, 1]
                assert starts[0] == ref.offset and ends[-1] == ref.offset + ref.nbytes, name
                assert (starts[1:] == ends[:-1]).all(), name


@pytest.mark.slow
def test_its_memory_is_what_the_shapes_say(converted):
    """Experts: 36 layers x 16 experts x 3 x 2880 x 2880 values of four bits, four bytes for 32 of them, and biases.
    Caches: K and V of one head."""
    engine = converted[1]
    memory = measure(engine)
    assert len(memory) == RANKS and all(rank.weights == memory[0].weights for rank in memory)
    experts = 36 * 16 * (3 * 2880 * 2880 * 20 // 32 + 3 * 2880 * 2)
    assert memory[0].weights["experts"] == experts
    assert memory[0].weights["attention"] == 36 * 2 * (10 * 64 * 2881 + 8 * 64 * 2880 + 2880 + 8)
    assert memory[0].cache_per_token == {"target": 36 * 2 * 64 * 2, "drafter": 8 * 2 * 64 * 2}
    assert memory[0].slots["H200"] < memory[0].slots["B200"] < memory[0].slots["B300"]
    slot = sum(memory[0].cache_per_token.values()) * engine.limits.cache_len
    assert memory[0].slots["H200"] == (141e9 * 0.9 - sum(memory[0].weights.values())) // slot
