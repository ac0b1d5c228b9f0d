"""Each rank gets exactly the weights it needs, and together they are the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint import (
    Experts,
    Pair,
    Target,
    TargetConfig,
    TensorRef,
    load_tensor,
    pair,
    read_draft,
    read_target,
)
from dflash_trt.checkpoint.model import Rope
from dflash_trt.checkpoint.weights import DTYPES
from dflash_trt.errors import UserError
from dflash_trt.graph.mapping import Mapping, Rank
from dflash_trt.graph.shard import check_mapping, cut, place
from tests.packed import pack
from tests.tiny import make_pair

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "sinks")
ROWS = ("o_proj", "down_proj")
MAPPINGS = [Mapping(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8)]


def ranks(mapping: Mapping) -> list[Rank]:
    return [Rank(mapping, number) for number in range(mapping.world)]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda m: f"tp{m.tp}-ep{m.ep}")
def test_ranks_form_a_grid(mapping):
    """Every rank is in one tensor-parallel group of tp ranks, and every (experts, width) part is on one rank."""
    groups = {rank.tp_group for rank in ranks(mapping)}
    assert sorted(member for group in groups for member in group) == list(range(mapping.world))
    assert all(len(group) == mapping.tp for group in groups)
    parts = [(rank.ep_rank, rank.expert_width_rank) for rank in ranks(mapping)]
    assert len({*parts}) == mapping.world == mapping.ep * max(rank.expert_widths for rank in ranks(mapping))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By name: what can be split in every way, float and packed."""
    root = tmp_path_factory.mktemp("pairs")
    wide = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 251}
    made = {}
    for name, base, options in [
        ("qwen3", "tiny-qwen3", {"target_config": wide}),
        ("experts", "tiny-gptoss", {"target_config": {"vocab_size": 251}}),
        ("mxfp4", "tiny-gptoss", {"target_config": {"intermediate_size": 128}, "experts": "mxfp4"}),
    ]:
        (root / name).mkdir()
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "dflash_config.mask_token_id": 250}
        target, draft = make_pair(root / name, base, draft_config=heads, **options)
        if name == "qwen3":
            pack(draft, "layers.*.mlp.*_proj", "layers.*.self_attn.*_proj")
        made[name] = pair(read_target(target), read_draft(draft))
    return made


@pytest.mark.parametrize("name, mapping", [
    ("qwen3", Mapping(2)), ("qwen3", Mapping(8)), ("experts", Mapping(4, 4)), ("experts", Mapping(8, 2)),
    ("experts", Mapping(2, 8)), ("mxfp4", Mapping(8, 8)), ("mxfp4", Mapping(4, 2)), ("mxfp4", Mapping(4, 1)),
])  # fmt: skip
def test_the_parts_of_all_ranks_are_the_whole(name, mapping, pairs, tmp_path):
    """The bytes that ranks refer to, or were given in their files, side by side again."""
    placed = [place(pairs[name], rank, tmp_path) for rank in ranks(mapping)]
    for role in ("target", "draft"):
        whole = getattr(pairs[name], role)
        for key, ref in whole.tensors.items():
            parts = [getattr(part, role).tensors[key] for part in placed]
            assert_together(key, ref, parts, mapping, whole.config.kv_heads)


def assert_together(key: str, ref: TensorRef, parts: list[TensorRef], mapping: Mapping, kv_heads: int) -> None:
    """`parts` of tensor `ref`, put together by hand: Megatron's columns and rows, experts, or all the same."""
    arrays = [load_tensor(part) for part in parts]
    whole, tp, ep = load_tensor(ref), mapping.tp, mapping.ep
    if ".experts." in key:
        bias = key.endswith("down_proj_bias")
        axis = (2 if "_blocks" in key or "_scales" in key else 1) if "down" in key else 2
        axis = 1 if "gate_up" in key and key.endswith(("_blocks", "_scales", "_bias")) else axis
        each = mapping.world // ep
        groups = [arrays[i * each : (i + 1) * each] for i in range(ep)]
        if bias:  # whole on every rank of a group; the graph of the first alone adds it
            assert all(same(group[0], other) for group in groups for other in group)
        together = np.concatenate([group[0] if bias else np.concatenate(group, axis) for group in groups], 0)
        assert same(together, whole), key
        return
    shared = key.endswith(("weight_scale_2", "input_scale")) or key.endswith(("o_proj.bias", "down_proj.bias"))
    columns, rows = (any(part in key for part in parts) for parts in (COLUMNS, ROWS))
    for group in (arrays[i : i + tp] for i in range(0, mapping.world, tp)):
        if shared or not (columns or rows):
            assert all(same(part, whole) for part in group), key
            continue
        if any(part in key for part in ("k_proj", "v_proj")) and tp > kv_heads:
            copies = tp // kv_heads
            assert all(same(group[i], group[i - i % copies]) for i in range(tp)), key
            group = group[::copies]
        assert same(np.concatenate(group, 1 if rows else 0), whole), key


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def test_only_what_is_no_range_of_the_checkpoint_is_written(pairs, tmp_path):
    """With MXFP4 experts split by expert: o_proj and the drafter's down_proj, nothing else."""
    placed = place(pairs["mxfp4"], Rank(Mapping(4, 4), 1), tmp_path)
    written = {key for half in (placed.target, placed.draft) for key, ref in half.tensors.items()
               if ref.file.parent == tmp_path}  # fmt: skip
    assert {key.partition("layers.")[2].partition(".")[2] for key in written} == {
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
    }
    alone = tmp_path / "alone"
    alone.mkdir()
    place(pairs["mxfp4"], Rank(), alone)
    assert not any(alone.iterdir())


sizes = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=150, deadline=None)
@given(
    mapping=st.sampled_from(MAPPINGS),
    kv_heads=sizes,
    per_kv=sizes,
    vocab=st.integers(8, 70),
    experts=st.sampled_from([None, 8, 16]),
    ffn=st.sampled_from([256, 512]),
    storage=st.sampled_from(["float", "mxfp4", "nvfp4"]),
)
def test_every_value_is_on_exactly_the_ranks_that_need_it(mapping, kv_heads, per_kv, vocab, experts, ffn, storage):
    target = shapes_alone(kv_heads, per_kv, vocab, experts, ffn, storage)
    try:
        check_mapping(Pair(target, None), mapping)
    except UserError:
        return
    for key, ref in target.tensors.items():
        counted = np.zeros(ref.shape, np.int64)
        for rank in ranks(mapping):
            piece = next(piece for piece in cut(target, rank) if piece.key == key)
            counted[tuple(slice(*bound) for bound in piece.bounds)] += 1
            if (found := piece.in_place) is not None:  # the range holds just these values
                numbers = np.arange(counted.size).reshape(ref.shape)[tuple(slice(*bound) for bound in piece.bounds)]
                size = DTYPES[ref.dtype].itemsize
                assert (found.offset - ref.offset) // size == numbers.min()
                assert found.nbytes // size == numbers.size == numbers.max() - numbers.min() + 1
        assert (counted == copies(key, mapping, kv_heads)).all(), key


def copies(key: str, mapping: Mapping, kv_heads: int) -> int:
    """On how many ranks a value must be."""
    if ".experts." in key and not key.endswith(("_scale_2", "_input_scale")):
        return mapping.world // mapping.ep if key.endswith("down_proj_bias") else 1
    groups = mapping.world // mapping.tp
    if any(part in key for part in ("k_proj", "v_proj")):
        return groups * max(1, mapping.tp // kv_heads)
    if not key.endswith("o_proj.bias") and any(part in key for part in COLUMNS + ROWS) and ".experts." not in key:
        return groups
    return mapping.world


def shapes_alone(kv_heads: int, per_kv: int, vocab: int, count: int | None, ffn: int, storage: str) -> Target:
    """A target without a file: cutting reads shapes only."""
    heads, dim, hidden = kv_heads * per_kv, 4, 32
    experts = Experts(count, 2, storage) if count else None
    config = TargetConfig(
        layers=1, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=dim, vocab=vocab, rms_eps=1e-5,
        rope=Rope(1e4), max_position=64, attention_bias=True, qk_norm=False, windows=(None,), model_type="gpt_oss",
        tie_embeddings=False, o_bias=True, mlp_bias=False, bos_id=None, eos_ids=(), experts=experts, sinks=True,
    )  # fmt: skip
    layer = {
        "self_attn.q_proj.weight": (heads * dim, hidden), "self_attn.q_proj.bias": (heads * dim,),
        "self_attn.k_proj.weight": (kv_heads * dim, hidden), "self_attn.v_proj.bias": (kv_heads * dim,),
        "self_attn.o_proj.weight": (hidden, heads * dim), "self_attn.o_proj.bias": (hidden,),
        "self_attn.sinks": (heads,), "input_layernorm.weight": (hidden,),
    }  # fmt: skip
    if count is None:
        layer |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    elif storage == "mxfp4":
        layer |= {
            "mlp.experts.gate_up_proj_blocks": (count, 2 * ffn, 1, 16),
            "mlp.experts.gate_up_proj_scales": (count, 2 * ffn, 1),
            "mlp.experts.down_proj_blocks": (count, hidden, ffn // 32, 16),
            "mlp.experts.down_proj_scales": (count, hidden, ffn // 32),
        }
    else:
        layer |= {"mlp.experts.gate_up_proj": (count, hidden, 2 * ffn), "mlp.experts.down_proj": (count, ffn, hidden)}
    if count:
        layer |= {
            "mlp.experts.gate_up_proj_bias": (count, 2 * ffn), "mlp.experts.down_proj_bias": (count, hidden),
            "mlp.router.weight": (count, hidden), "mlp.experts.down_proj_weight_scale_2": (),
        }  # fmt: skip
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    nowhere = Path("nowhere")
    tensors = {name: TensorRef(name, nowhere, 1000, 2 * int(np.prod(shape)), "BF16", shape)
               for name, shape in shapes.items()}  # fmt: skip
    return Target(nowhere, config, tensors)


@pytest.mark.parametrize("name, mapping, words", [
    ("experts", Mapping(3, 1), ["8 attention heads", "3 ranks"]),
    ("experts", Mapping(16, 8), ["8 attention heads", "16 ranks"]),
    ("experts", Mapping(4, 0), ["0 is too small", "--ep"]),
    ("qwen3", Mapping(2, 2), ["no experts", "--ep"]),
    ("qwen3", Mapping(-1), ["-1 is too small", "--tp"]),
])  # fmt: skip
def test_mappings_that_do_not_fit_are_refused(name, mapping, words, pairs):
    with pytest.raises(UserError) as refusal:
        check_mapping(pairs[name], mapping)
    for word in words:
        assert word in str(refusal.value)


def test_a_cut_inside_a_scale_block_is_refused(pairs, tmp_path):
    """gpt-oss-120b's 2880 over eight ranks is 360, no multiple of 32: split by expert instead."""
    with pytest.raises(UserError) as refusal:
        place(pairs["mxfp4"], Rank(Mapping(8, 1), 3), tmp_path)  # 128 / 8 = 16
    for word in ("down_proj_blocks", "16 of 128", "scale block", "--ep"):
        assert word in str(refusal.value)
    assert not any(tmp_path.iterdir())


def test_a_vocabulary_smaller_than_the_ranks_is_refused(pairs):
    models = pairs["qwen3"]
    tiny = replace(models.target, config=replace(models.target.config, vocab=9))
    with pytest.raises(UserError, match="a vocabulary of 9 cannot be split over 8 ranks"):
        check_mapping(Pair(tiny, None), Mapping(8))
