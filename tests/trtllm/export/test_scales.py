"""NVFP4 scales in TensorRT-LLM's layout, against the layout's own formula and ModelOpt's code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.nvfp4 import FLOAT8
from dflash_trt.errors import UserError
from dflash_trt.trtllm.export import export_pair
from dflash_trt.trtllm.export.scales import interleave, interleaved_shape
from dflash_trt.trtllm.export.share import Share
from tests.tiny import dequantized, load_tensors
from tests.trtllm.export.pairs import make, quantized
from tests.trtllm.export.reading import read_network, tile_offset

SIZES = st.integers(1, 300), st.integers(1, 21)


def random_scales(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows * 31 + columns).integers(0, 127, (rows, columns), np.uint8).view(FLOAT8)


def as_torch(scales: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn)


@given(*SIZES)
def test_every_scale_lies_where_the_formula_says_and_the_padding_is_zero(rows, columns):
    scales = random_scales(rows, columns)
    tiled = interleave(scales)
    assert tiled.dtype == FLOAT8
    assert tiled.shape == interleaved_shape(rows, columns) == (-(-rows // 128) * 128, -(-columns // 4) * 4)
    left = tiled.view(np.uint8).reshape(-1).copy()
    for r in range(rows):
        for c in range(columns):
            at = tile_offset(r, c, tiled.shape[1])
            assert left[at] == scales.view(np.uint8)[r, c]
            left[at] = 0
    assert not left.any()


@given(*SIZES)
def test_modelopts_layout_for_cublas_is_the_same(rows, columns):
    from modelopt.torch.export.diffusers_utils import swizzle_nvfp4_scales

    scales = random_scales(rows, columns)
    weight, one = torch.zeros(rows, columns * 8, dtype=torch.uint8), torch.ones(())
    state = {"x.weight": weight, "x.weight_scale": as_torch(scales), "x.weight_scale_2": one}
    theirs = swizzle_nvfp4_scales(state)["x.weight_scale"]
    assert np.array_equal(interleave(scales).view(np.uint8), theirs.view(torch.uint8).numpy())


@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from(["rows", "columns", None]), st.data())
def test_shares_of_all_ranks_make_the_whole_in_whatever_pieces_it_is_read(size, tp, axis, data):
    parts = data.draw(st.sampled_from([p for p in range(1, tp + 1) if tp % p == 0]))
    share = Share(axis, parts) if axis else Share(None)
    columns = 2 * parts if axis == "columns" else 2
    whole = np.arange(size * columns).reshape(size, columns) + 1
    at = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    pieces = list(zip([0, *at], np.split(whole, at), strict=True))
    ranks = []
    for rank in range(tp):
        own = [share.cut(piece, begin, size, rank, tp) for begin, piece in pieces]
        padding = np.zeros((share.missing(size, rank, tp), columns), int)
        ranks.append(np.concatenate([*own, padding] if axis != "columns" else own))
        assert ranks[-1].shape == share.shape(whole.shape)
    distinct = ranks[:: tp // parts] if axis else ranks[:1]
    assert all(np.array_equal(rank, distinct[i * parts // tp if axis else 0]) for i, rank in enumerate(ranks))
    joined = np.concatenate(distinct, axis=1 if axis == "columns" else 0)
    assert np.array_equal(joined[:size], whole) and not joined[size:].any()


def multiply(directory: Path, name: str, factor: float) -> None:
    """Change one scale of a checkpoint, with no regard for others."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name] * factor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def packed(tmp_path):
    target, draft = make(tmp_path / "source", "tiny-llama")
    return quantized(target, tmp_path / "target"), draft


@pytest.mark.parametrize("letter", "qkv")
@pytest.mark.parametrize("factor", [0.5, 0.25])
def test_a_member_of_qkv_with_a_smaller_global_scale_takes_the_common_one_where_that_is_exact(
    letter, factor, packed, tmp_path
):
    target, draft = packed
    name = f"model.layers.2.self_attn.{letter}_proj.weight_scale_2"
    before = load_tensors(target)[name]
    multiply(target, name, factor)  # the module's values shrink by a power of two
    want = load_tensors(dequantized(target))
    export_pair(target, draft, tmp_path / "out", tp=2)
    network = read_network(tmp_path / "out/target")
    assert network.ranks[1]["transformer.layers.2.attention.qkv.weights_global_scaling_factor"].item() == before
    back = network.as_published("model.")
    assert all(np.array_equal(back[name], value.astype(np.float32)) for name, value in want.items())


def test_a_member_of_qkv_whose_scale_cannot_be_changed_exactly_is_refused_with_the_fix(packed, tmp_path):
    target, draft = packed
    multiply(target, "model.layers.1.self_attn.k_proj.weight_scale_2", 0.7)
    with pytest.raises(UserError, match=r"k_proj\.weight_scale_2 is .*that of its neighbours.*dflash-trt quantize"):
        export_pair(target, draft, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["self_attn.v_proj", "mlp.up_proj"])
def test_linears_that_read_one_input_must_scale_it_alike(module, packed, tmp_path):
    target, draft = packed
    name = f"model.layers.4.{module}.input_scale"
    multiply(target, name, 1.5)
    with pytest.raises(UserError, match=rf"{name} is .*quantizes their input once.*dflash-trt quantize"):
        export_pair(target, draft, tmp_path / "out")


def test_gate_and_up_may_have_global_scales_of_their_own(packed, tmp_path):
    """They are two matrices in the network."""
    target, draft = packed
    multiply(target, "model.layers.1.mlp.up_proj.weight_scale_2", 0.7)
    export_pair(target, draft, tmp_path / "out")
    back = read_network(tmp_path / "out/target").as_published("model.")
    want = load_tensors(dequantized(target))["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(back["model.layers.1.mlp.up_proj.weight"], want)


@pytest.mark.parametrize(("byte", "what"), [(0x7F, "NaN"), (0xFF, "NaN"), (0xB8, "a negative number")])
def test_damaged_block_scales_are_named(byte, what, packed, tmp_path):
    target, draft = packed
    file, name = target / "model.safetensors", "model.layers.3.mlp.down_proj.weight_scale"
    tensors = load_file(file)
    tensors[name].view(torch.uint8)[5, 2] = byte
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} holds {what} at \[5, 2\]"):
        export_pair(target, draft, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
