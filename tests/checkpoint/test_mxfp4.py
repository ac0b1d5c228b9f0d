"""MXFP4 against ml_dtypes and transformers; its cast to NVFP4 keeps every value it can and counts the others."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.checkpoint import mxfp4, nvfp4

FLOAT4, FLOAT8 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def random(exponents: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Every nibble under the given exponents [..., n]."""
    scales = (np.asarray(exponents) + mxfp4.BIAS).astype(np.uint8)
    return np.random.default_rng(seed).integers(0, 256, (*scales.shape, 16), dtype=np.uint8), scales


def cast_and_decode(blocks: np.ndarray, scales: np.ndarray, k_max: int | None = None) -> tuple[mxfp4.Cast, np.ndarray]:
    k_max = mxfp4.largest_exponent(scales) if k_max is None else k_max
    cast = mxfp4.to_nvfp4(blocks, scales, k_max)
    return cast, nvfp4.decode(cast.codes, cast.scales, mxfp4.nvfp4_scale(k_max))


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def count_changed(before: np.ndarray, after: np.ndarray) -> int:
    return int((before != after).reshape(-1, mxfp4.BLOCK).any(-1).sum())


def test_decoding_is_ml_dtypes_for_every_byte_and_exponent():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(255, axis=0)
    scales = np.arange(255, dtype=np.uint8)[:, None].repeat(16, axis=1)
    codes = np.stack([blocks & 15, blocks >> 4], -1).view(FLOAT4).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = codes.reshape(255, 16, 32) * scales.view(E8M0).astype(np.float32)[..., None]
    assert_same_bits(mxfp4.decode(blocks, scales), expected.reshape(255, -1))
    assert_same_bits(mxfp4.decode(blocks, scales.view(E8M0)), expected.reshape(255, -1))


def test_decoding_is_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert

    blocks, scales = random(np.random.default_rng(0).integers(-20, 10, (3, 6, 4)))
    theirs = convert(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)  # [E, in, out]
    assert_same_bits(mxfp4.decode(blocks, scales), np.ascontiguousarray(theirs.numpy().transpose(0, 2, 1)))


def test_a_nan_scale_decodes_to_nan():
    assert np.isnan(mxfp4.decode(np.zeros((1, 16), np.uint8), np.array([255], np.uint8))).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
def test_encoding_finds_the_nearest_value_under_the_exponent_of_the_standard(seed, dtype):
    rng = np.random.default_rng(seed)
    halves = rng.integers(-64, 65, (8, 32)) / 8 * np.exp2(rng.integers(-10, 10, (8, 1)))  # ties among them
    values = np.where(rng.random((8, 1)) < 0.5, halves, rng.normal(size=(8, 32))).astype(dtype).astype(np.float64)
    blocks, scales = mxfp4.encode(values.astype(dtype))
    amax = np.abs(values).max(-1)
    exponent = np.array([np.floor(np.log2(a)) - 2 if a else -127 for a in amax])
    np.testing.assert_array_equal(scales[:, 0], exponent + 127)
    relative = values / np.exp2(exponent)[:, None]
    grid = nvfp4.VALUES[:8].astype(np.float64)
    distance = np.abs(np.abs(relative)[..., None] - grid)
    even_first = np.argsort(distance + (np.arange(8) % 2) * 1e-12, axis=-1, kind="stable")[..., 0]
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(8, 32)
    np.testing.assert_array_equal(codes & 7, even_first)
    np.testing.assert_array_equal(codes >> 3, np.signbit(relative))


def test_encoding_covers_float32_from_its_smallest_to_its_largest():
    tiny, top = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    values = np.repeat(np.array([[tiny], [top], [0]], np.float32), 32, axis=1)
    blocks, scales = mxfp4.encode(values)
    assert scales.ravel().tolist() == [0, 252, 0]
    assert mxfp4.decode(blocks, scales)[:, 0].tolist() == [0, 1.5 * 2.0**127, 0]


@given(st.integers(0, 2**32 - 1))
def test_encoding_what_was_decoded_gives_the_values_again(seed):
    blocks, scales = random(np.random.default_rng(seed).integers(-100, 100, (4, 3)), seed)
    values = mxfp4.decode(blocks, scales)
    assert_same_bits(mxfp4.decode(*mxfp4.encode(values)), values)


def test_encoding_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.encode(np.ones((2, 48), np.float32))
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            mxfp4.encode(np.array([[bad] * 32], np.float32))


@pytest.mark.parametrize("spread", [0, 1, 9, 14, 15, 16, 17])
@pytest.mark.parametrize("k_max", [-110, -8, 0, 5, 124])
def test_within_17_exponents_the_cast_keeps_every_bit(spread, k_max):
    exponents = np.random.default_rng(spread).integers(k_max - spread, k_max + 1, (6, 40))
    exponents[0, :2] = k_max - spread, k_max
    blocks, scales = random(exponents)
    cast, values = cast_and_decode(blocks, scales)
    assert (cast.changed, cast.out_of_window) == (0, 0)
    np.testing.assert_array_equal(cast.codes, blocks.reshape(6, -1))
    assert_same_bits(values, mxfp4.decode(blocks, scales))


@given(st.integers(0, 2**32 - 1), st.integers(-127, 127), st.integers(0, 40))
def test_the_counts_are_those_of_the_decoded_values(seed, k_max, spread):
    rng = np.random.default_rng(seed)
    lowest = max(k_max - spread, -127)
    blocks, scales = random(rng.integers(lowest, k_max + 1, (3, 8)), seed)
    blocks[rng.random((3, 8)) < 0.3] &= np.uint8(rng.choice([0x00, 0x08, 0x80, 0x88, 0x66]))
    cast, values = cast_and_decode(blocks, scales, k_max)
    exact = mxfp4.decode(blocks, scales)
    assert cast.changed == count_changed(exact, values)
    outside = k_max + 127 - scales.astype(int) > 17
    assert cast.out_of_window == (outside & (blocks & 0x77).any(-1)).sum()
    inside = ~np.repeat(outside, 32, axis=-1)
    assert_same_bits(values[inside], exact[inside])


def test_blocks_outside_the_window_get_the_best_codes_of_the_best_scale():
    """No e4m3 scale and codes at all come closer, the two halves of a block taken apart."""
    exponents = np.array([[0, -17, -18, -19, -20, -21, -22, -23, -40]]).repeat(8, axis=0)
    blocks, scales = random(exponents)
    _, values = cast_and_decode(blocks, scales, 0)
    exact = mxfp4.decode(blocks, scales).astype(np.float64).reshape(-1, nvfp4.BLOCK)
    every_scale = np.arange(1, 127, dtype=np.uint8).view(FLOAT8).astype(np.float64) * 2.0**-8
    reachable = every_scale[:, None] * nvfp4.VALUES  # [126, 16]
    best = np.full(len(exact), np.inf)
    for grid in reachable:
        error = np.abs(exact[..., None] - grid).min(-1)
        best = np.minimum(best, np.square(error).sum(-1))
    ours = np.square(exact - values.reshape(-1, nvfp4.BLOCK)).sum(-1)
    np.testing.assert_array_equal(ours, best)


def test_blocks_of_zeros_are_exact_whatever_their_exponent():
    blocks, scales = random([[0, -17, -30, -127]])
    blocks[0, 2:] &= 0x88
    cast, values = cast_and_decode(blocks, scales)
    assert (cast.changed, cast.out_of_window) == (0, 0)
    assert_same_bits(values, mxfp4.decode(blocks, scales))


def test_a_tensor_whose_scales_are_all_e8m0_zero_is_cast_to_zeros():
    blocks, scales = random(np.full((1, 4), -127))
    blocks[0, :2] = 0
    assert mxfp4.largest_exponent(scales) == 0
    assert mxfp4.largest_exponent(scales[:, :0]) == 0
    cast, values = cast_and_decode(blocks, scales)
    assert not values.any() and (cast.changed, cast.out_of_window) == (2, 2)


def test_exponent_zero_of_e8m0_counts_once_there_are_others():
    assert mxfp4.largest_exponent(np.array([0, 100, 120, 0], np.uint8)) == -7
    assert mxfp4.largest_exponent(np.array([0, 1], np.uint8)) == -126


def test_slices_under_one_k_max_make_the_same_bytes_as_the_whole():
    blocks, scales = random(np.random.default_rng(0).integers(-25, 1, (12, 8)))
    whole, _ = cast_and_decode(blocks, scales)
    parts = [cast_and_decode(blocks[i : i + 5], scales[i : i + 5], 0)[0] for i in range(0, 12, 5)]
    np.testing.assert_array_equal(np.concatenate([part.codes for part in parts]), whole.codes)
    joined = np.concatenate([part.scales.view(np.uint8) for part in parts])
    np.testing.assert_array_equal(joined, whole.scales.view(np.uint8))
    assert sum(part.changed for part in parts) == whole.changed > 0


@pytest.mark.parametrize("lowest", [-17, -18])
def test_given_memory_is_filled_and_the_source_left_alone(lowest):
    blocks, scales = random([[0, lowest, -3]])
    before = blocks.copy()
    out = np.empty((1, 48), np.uint8), np.empty((1, 6), FLOAT8)
    cast, alone = mxfp4.to_nvfp4(blocks, scales, 0, out), mxfp4.to_nvfp4(blocks, scales, 0)
    assert cast.codes is out[0] and cast.scales is out[1]
    np.testing.assert_array_equal(cast.codes, alone.codes)
    np.testing.assert_array_equal(cast.scales.view(np.uint8), alone.scales.view(np.uint8))
    np.testing.assert_array_equal(blocks, before)
    assert np.shares_memory(alone.codes, blocks) == (lowest == -17)
    assert alone.codes.flags.writeable == (lowest != -17)


def test_the_cast_refuses_nan_scales_a_small_k_max_and_shapes_that_do_not_fit():
    blocks, scales = random([[0, 3]])
    with pytest.raises(ValueError, match="at least 3"):
        mxfp4.to_nvfp4(blocks, scales, 2)
    with pytest.raises(ValueError, match="k_max 128"):
        mxfp4.to_nvfp4(blocks, scales, 128)
    with pytest.raises(ValueError, match="NaN"):
        mxfp4.to_nvfp4(blocks, np.array([[127, 255]], np.uint8), 127)
    with pytest.raises(ValueError, match="do not fit"):
        mxfp4.to_nvfp4(blocks, scales[:, :1], 3)
    with pytest.raises(ValueError, match="int64"):
        mxfp4.to_nvfp4(blocks, scales.astype(np.int64), 3)


@pytest.mark.parametrize(("width", "count"), [(32, 3), (48, 4)])
def test_memory_of_another_shape_is_refused(width, count):
    blocks, scales = random([[0, 3]])
    with pytest.raises(ValueError, match=r"C-contiguous, of shapes \[\(1, 32\), \(1, 4\)\]"):
        mxfp4.to_nvfp4(blocks, scales, 3, (np.empty((1, width), np.uint8), np.empty((1, count), FLOAT8)))


def test_the_layout_of_the_source_in_memory_does_not_matter():
    blocks, scales = random(np.random.default_rng(0).integers(-25, 1, (6, 8)))
    plain, values = cast_and_decode(blocks, scales)
    other, same = cast_and_decode(np.asfortranarray(blocks), np.asfortranarray(scales))
    assert (plain.changed, plain.out_of_window) == (other.changed, other.out_of_window)
    assert_same_bits(same, values)


@pytest.mark.parametrize("spread", [9, 17, 29])
def test_the_cast_is_modelopts_but_for_the_sign_of_zeros(spread):
    from modelopt.torch.export import shard_cast_utils as cast_utils

    blocks, scales = random(np.random.default_rng(0).integers(-spread - 3, -2, (16, 20)))
    k_max = mxfp4.largest_exponent(scales)
    assert k_max == cast_utils.mxfp4_kmax(torch.from_numpy(scales))
    codes, block_scales, scale, *_ = cast_utils.quantize_mxfp4_to_nvfp4_lossless(
        torch.from_numpy(blocks.reshape(16, -1)), torch.from_numpy(scales), k_max, "cpu"
    )
    cast, values = cast_and_decode(blocks, scales)
    np.testing.assert_array_equal(cast.scales.view(np.uint8), block_scales.view(torch.uint8).numpy())
    assert mxfp4.nvfp4_scale(k_max) == scale.numpy()
    theirs = nvfp4.decode(codes.numpy(), block_scales.view(torch.uint8).numpy().view(FLOAT8), mxfp4.nvfp4_scale(k_max))
    np.testing.assert_array_equal(values, theirs)  # == holds between 0 and -0


def test_bytes_transpose_whatever_the_shape():
    rng = np.random.default_rng(0)
    for rows, columns in itertools.product((0, 1, 31, 192, 200, 385), (0, 1, 64, 100)):
        source = rng.integers(0, 256, (2, rows, columns), dtype=np.uint8)
        out = np.empty((2, columns, rows), np.uint8)
        assert mxfp4.transpose_bytes(source, out) is out
        np.testing.assert_array_equal(out, source.transpose(0, 2, 1))
        np.testing.assert_array_equal(mxfp4.transpose_bytes(source[0].T), source[0])
    scales = rng.integers(0, 127, (5, 7), dtype=np.uint8).view(FLOAT8)
    turned = mxfp4.transpose_bytes(scales)
    assert turned.dtype == FLOAT8 and (turned == scales.T).all()
