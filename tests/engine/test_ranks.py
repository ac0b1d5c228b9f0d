"""Directories of several ranks: what convert says of them, and that every rank compiles, collectives included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_trt.cli import app
from dflash_trt.engine import Engine, build, convert, open_engine, worker
from dflash_trt.engine.memory import measure
from dflash_trt.errors import UserError
from tests.tiny import make_pair

LAYERS = 2
LIMITS = {"max_batch": 2, "max_seq_len": 64, "max_query": 16}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}  # a rank of four has four and one


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """gpt-oss with a sliding and a full layer, experts in MXFP4."""
    return make_pair(
        tmp_path_factory.mktemp("pair"),
        "tiny-gptoss",
        target_config={"num_hidden_layers": LAYERS, **HEADS},
        draft_config={"dflash_config.target_layer_ids": [0, 1], **HEADS},
        experts="mxfp4",
    )


@pytest.fixture(scope="module")
def four(pair, tmp_path_factory) -> Path:
    return convert(*pair, tmp_path_factory.mktemp("engines") / "engine", tp=4, **LIMITS).path


def test_a_rank_has_its_own_graphs_and_what_was_written_for_it(four):
    manifest = open_engine(four).manifest
    assert (manifest.mapping.tp, manifest.mapping.ep, manifest.mapping.world) == (4, 4, 4)  # experts: over all ranks
    for rank in range(4):
        names = [f"rank{rank}{part}{form}.onnx" for part in ("", "-ar") for form in ("", ".cpu")]
        assert {*names, f"rank{rank}.safetensors"} <= manifest.files.keys()
    assert manifest.target.mxfp4 == 2 * LAYERS
    shown = CliRunner().invoke(app, ["inspect", str(four), "--json"])
    assert json.loads(shown.stdout)["written_bytes"] == manifest.written


def test_memory_is_told_for_each_rank(four):
    result = CliRunner().invoke(app, ["inspect", str(four), "--memory", "--json"])
    assert result.exit_code == 0, result.output
    ranks = json.loads(result.stdout)["memory"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    # One key/value head of 16 dimensions in bfloat16, K and V, in two layers of each model.
    assert ranks[3]["cache_per_token"] == {"target": LAYERS * 2 * 16 * 2, "drafter": 2 * 2 * 16 * 2}
    experts = 2 * (3 * 64 * 96 * 20 // 32 + (2 * 96 + 64) * 2)  # two a rank: 5 bits a value, biases in bfloat16
    assert ranks[0]["weights"]["experts"] == LAYERS * experts
    table = CliRunner().invoke(app, ["inspect", str(four), "--memory"]).stdout
    assert "ranks 0-3" in table and "slots on B300" in table


def test_memory_is_refused_for_a_checkpoint(pair):
    result = CliRunner().invoke(app, ["inspect", str(pair[0]), "--memory"])
    assert isinstance(result.exception, UserError) and "engine directories" in str(result.exception)


def test_memory_of_one_rank_is_all_there_is(pair, tmp_path):
    (rank,) = measure(convert(*pair, tmp_path / "engine", **LIMITS))
    assert set(rank.weights) == {"drafter", "embedding", "head", "experts", "attention", "router", "norms"}
    assert rank.cache_per_token["target"] == 4 * LAYERS * 2 * 16 * 2


def compiled(engine: Engine, rank: int, plan: Path) -> dict[str, int]:
    graph, packed = engine.graph(rank=rank, cpu=False), engine.manifest.target.packed
    job = worker.Job("tensorrt-rtx", 120, str(graph), 2 * LAYERS, packed, engine.limits, str(plan))
    return worker.run(job, lambda what, fraction: None)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_every_rank_compiles_with_its_collectives(rank, four, tmp_path):
    """A sum for each embedding, o_proj and MLP or experts, an exchange for each choice, the logits for sampling."""
    layers = compiled(open_engine(four), rank, tmp_path / "plan")
    assert layers["DIST_COLLECTIVE"] == 2 + 2 * 2 * LAYERS + 2 + 1
    assert layers["ATTENTION"] == 2 * LAYERS
    assert (tmp_path / "plan").stat().st_size > 1_000_000


@pytest.mark.slow
def test_groups_of_two_sizes_compile(pair, tmp_path):
    """Attention over two ranks, experts over four."""
    engine = convert(*pair, tmp_path / "engine", tp=2, ep=4, **LIMITS)
    assert compiled(engine, 3, tmp_path / "plan")["DIST_COLLECTIVE"] == 2 + 2 * 2 * LAYERS + 2 + 1


@pytest.mark.slow
def test_build_compiles_all_ranks(pair, tmp_path):
    engine = convert(pair[0], None, tmp_path / "engine", tp=2, **LIMITS)
    built = build(engine.path, sm=120)
    assert [made.file for made in built] == ["rank0-ar.sm120.engine", "rank1-ar.sm120.engine"]
    assert open_engine(engine.path).compiled(120, rank=1, draft=False) == built[1]


@pytest.mark.parametrize(("options", "words"), [
    (["--tp", "5"], ["16 attention heads", "5 ranks", "--tp"]),
    (["--tp", "4", "--ep", "1"], ["scale block", "--ep"]),
    (["--tp", "0"], ["0 is too small", "--tp"]),
])  # fmt: skip
def test_convert_refuses_what_cannot_be_split(options, words, pair, tmp_path):
    output = tmp_path / "engine"
    command = ["convert", "--target", str(pair[0]), "--draft", str(pair[1]), "-o", str(output), *options]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, UserError)
    for word in words:
        assert word in str(error)
    assert not any(tmp_path.iterdir())
