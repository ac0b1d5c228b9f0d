"""NVFP4 bytes are ModelOpt's, whatever the weights; where they differ, they differ as documented."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dflash_trt.checkpoint import nvfp4

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
TORCH = {BFLOAT16: torch.bfloat16, np.dtype(np.float16): torch.float16, np.dtype(np.float32): torch.float32}


@pytest.fixture(scope="module")
def modelopt():
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    return NVFP4QTensor


def to_torch(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(f"i{values.itemsize}").copy()).view(TORCH[values.dtype])


def from_torch(scales: torch.Tensor) -> np.ndarray:
    return scales.view(torch.uint8).numpy()


def assert_same_bytes(modelopt, values: np.ndarray, scale: np.float32) -> None:
    expected, expected_scales, _ = modelopt.quantize(to_torch(values), nvfp4.BLOCK, None, torch.tensor(scale))
    codes, scales = nvfp4.encode(values, scale)
    assert codes.dtype == np.uint8 and scales.dtype == FLOAT8
    np.testing.assert_array_equal(scales.view(np.uint8), from_torch(expected_scales))
    np.testing.assert_array_equal(codes, expected._quantized_data.numpy())


def amax(values: np.ndarray) -> float:
    return float(np.abs(values.astype(np.float32)).max())


def weights(kind: str, dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(96, 512))
    top, tiny = float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).smallest_subnormal)
    by_block = np.repeat(np.exp2(rng.uniform(-40, 4, (96, 32))), nvfp4.BLOCK, axis=-1)
    grid = rng.choice([*nvfp4.BOUNDS, *nvfp4.VALUES], (96, 512)) * rng.choice([-1, 1], (96, 512))
    grid[:, :: nvfp4.BLOCK] = 6
    values = {
        "normal": normal * 0.02,
        "heavy-tailed": rng.standard_t(2, (96, 512)) * 0.02,
        "tiny": normal * tiny * 100,
        "subnormal": rng.integers(-3, 4, (96, 512)) * tiny,
        "huge": normal.clip(-4, 4) / 4 * top,
        "mixed": normal * by_block,
        "zeros": normal * 0.02 * rng.choice([0.0, -0.0, 1], (96, 512)) * (by_block > 1e-6),
        "ties": grid * np.exp2(rng.integers(-8, 3, (96, 1))),
    }[kind]
    return values.astype(dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "tiny", "subnormal", "huge", "mixed", "zeros", "ties"])
@pytest.mark.parametrize("share", [1, 1 / 3, 7, 1e6], ids=lambda share: f"amax×{share:.3g}")
def test_the_bytes_are_modelopts(modelopt, kind, dtype, share):
    """`share`: the global scale may be that of a group, or of other weights than these."""
    values = weights(kind, dtype)
    assert_same_bytes(modelopt, values, nvfp4.global_scale(min(amax(values) * share, 3.4e38)))


@pytest.mark.parametrize("scale", [1.0, 0.0123, 1e-30, 3e33, 1e-45])
def test_every_bfloat16_gets_modelopts_code_under_every_block_scale(modelopt, scale):
    scale = np.float32(scale)
    finite = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    finite = finite[np.isfinite(finite.astype(np.float32))]
    scales = np.arange(1, 127, dtype=np.uint8).view(FLOAT8)
    values = np.broadcast_to(finite, (len(scales), len(finite))).copy()
    shape = (len(scales), len(finite) // nvfp4.BLOCK)
    wanted = np.broadcast_to(scales.astype(np.float32)[:, None] * (6 * scale), shape)
    codes, ours = nvfp4.encode(values, scale, wanted)
    given = torch.from_numpy(ours.view(np.uint8)).view(torch.float8_e4m3fn)
    expected, *_ = modelopt.quantize(to_torch(values), nvfp4.BLOCK, given, torch.tensor(scale))
    np.testing.assert_array_equal(codes, expected._quantized_data.numpy())


@st.composite
def any_weights(draw) -> tuple[np.ndarray, np.float32]:
    """Any finite bits, or values of one magnitude, under any positive global scale."""
    dtype = draw(st.sampled_from(list(TORCH)))
    bits = np.dtype(f"u{dtype.itemsize}")
    shape = (draw(st.integers(1, 3)), nvfp4.BLOCK * draw(st.integers(1, 3)))
    if draw(st.booleans()):
        values = draw(arrays.arrays(bits, shape)).view(dtype)
        values = np.where(np.isfinite(values.astype(np.float32)), values, dtype.type(1)).astype(dtype)
    else:
        steps = draw(arrays.arrays(np.int16, shape, elements=st.integers(-64, 64)))
        values = (steps * np.float32(2.0) ** draw(st.integers(-20, 8))).astype(dtype)
    natural = amax(values) / 2688
    scale = draw(st.one_of(st.just(natural), st.floats(2.0**-149, 2.0**127, width=32), st.floats(natural / 8, natural)))
    return values, np.float32(scale) if np.float32(scale) > 0 else np.float32(1)


@given(any_weights())
def test_the_bytes_are_modelopts_for_any_bits(modelopt, case):
    assert_same_bytes(modelopt, *case)


@given(st.floats(2.0**-137, 2.0**127, width=32))
def test_the_global_scale_is_modelopts(modelopt, largest):
    expected = modelopt.get_weights_scaling_factor_2(torch.tensor([[-largest, 0.0]]))
    assert nvfp4.global_scale(largest) == expected.numpy()


@given(st.integers(0, 2**32 - 1), st.floats(2.0**-149, 2.0**110, width=32))
def test_decoding_is_modelopts(modelopt, seed, scale):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (3, 24), dtype=np.uint8)
    scales = rng.integers(0, 127, (3, 3), dtype=np.uint8).view(FLOAT8)
    packed = modelopt(torch.Size([3, 48]), torch.float32, torch.from_numpy(codes))
    expected = packed.dequantize(
        scale=torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn),
        double_scale=torch.tensor(np.float32(scale)),
        block_sizes={-1: nvfp4.BLOCK},
    )
    # + 0.0: code 8 is -0 for us alone
    values = nvfp4.decode(codes, scales, np.float32(scale)) + np.float32(0)
    np.testing.assert_array_equal(values.view(np.uint32), (expected.numpy() + np.float32(0)).view(np.uint32))


def test_code_8_decodes_to_minus_zero_as_in_onnx():
    codes = np.full((1, 8), 0x08, np.uint8)
    values = nvfp4.decode(codes, np.ones((1, 1), FLOAT8), np.float32(1))
    assert np.signbit(values[0]).tolist() == [True, False] * 8 and not values.any()
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(nvfp4.VALUES.view(np.uint32), every.view(np.uint32))


def test_zeros_of_either_sign_get_code_0_and_tiny_negatives_code_8():
    values = np.zeros((1, 16), BFLOAT16)
    values[0, :4] = [6, -0.0, 0, -1e-6]
    codes, _ = nvfp4.encode(values, np.float32(1))
    assert codes[0, :2].tolist() == [0x07, 0x80]


@DTYPES
def test_a_tensor_of_zeros_decodes_to_zeros_where_modelopt_writes_nan(modelopt, dtype):
    values = np.zeros((2, 32), dtype)
    scale = nvfp4.global_scale(0.0)
    codes, scales = nvfp4.encode(values, scale)
    assert scale == 1 and (scales.astype(np.float32) == 1).all() and not codes.any()
    assert not nvfp4.decode(codes, scales, scale).any()
    _, theirs, their_scale = modelopt.quantize(to_torch(values), nvfp4.BLOCK)
    assert their_scale == 0 and theirs.float().isnan().all()


def test_a_tensor_too_small_for_a_global_scale_decodes_to_zeros_where_modelopt_writes_nan(modelopt):
    values = np.full((1, 16), 2.0**-140, np.float32)
    scale = nvfp4.global_scale(amax(values))
    assert scale == 1 and not nvfp4.decode(*nvfp4.encode(values, scale), scale).any()
    _, theirs, their_scale = modelopt.quantize(to_torch(values), nvfp4.BLOCK)
    assert their_scale == 0 and theirs.float().isfinite().all()  # clipped to 448: not NaN, but 0 × 448 all the same


def test_a_block_of_zeros_has_scale_1():
    values = np.ones((1, 48), BFLOAT16)
    values[0, 16:32] = 0
    codes, scales = nvfp4.encode(values, nvfp4.global_scale(1))
    assert scales.astype(np.float32).tolist() == [[448, 1, 448]]
    assert not codes[0, 8:16].any()


@DTYPES
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_where_modelopt_encodes_them(dtype, bad):
    values = np.ones((3, 32), dtype)
    values[1, 17] = bad
    with pytest.raises(ValueError, match="not finite"):
        nvfp4.encode(values, np.float32(1))
    with pytest.raises(ValueError, match="not finite"):
        nvfp4.encode(values, np.float32(1), np.ones((3, 2), np.float32))


def test_modelopt_spoils_a_block_with_nan_and_clips_infinity(modelopt):
    values = torch.ones(1, 32)
    values[0, 3], values[0, 19] = torch.nan, torch.inf
    codes, scales, _ = modelopt.quantize(values, nvfp4.BLOCK, None, torch.tensor(0.5))
    assert (codes._quantized_data[0, :8] == 0x77).all() and scales[0, 0].isnan()
    assert scales[0, 1].float() == 448 and codes._quantized_data[0, 9] == 0x70


def test_modelopts_export_of_static_quantizers_rounds_a_few_block_scales_the_other_way(modelopt):
    values = np.random.default_rng(0).normal(size=(512, 1024)).astype(BFLOAT16)
    values[0, 0], values[1, :16] = 7, 0  # with an amax of 7 many quotients are ties
    maxima = np.abs(values.astype(np.float32)).reshape(512, 64, 16).max(-1)
    quantizer = SimpleNamespace(
        block_sizes={-1: 16}, global_amax=torch.tensor(7.0), _amax=torch.from_numpy(maxima).reshape(-1, 1)
    )
    theirs, _ = modelopt.get_weights_scaling_factor_from_quantizer(quantizer, to_torch(values))
    _, scales = nvfp4.encode(values, nvfp4.global_scale(7))
    steps = np.abs(from_torch(theirs).astype(int) - scales.view(np.uint8))
    assert theirs[1, 0] == 448 * 6 / 7 and scales[1, 0] == 1  # zeros
    steps[1, 0] = 0
    assert steps.max() == 1 and 0 < steps.mean() < 0.02


def test_a_width_that_modelopt_pads_is_refused(modelopt):
    assert modelopt.quantize(torch.ones(2, 24), nvfp4.BLOCK)[0]._quantized_data.shape == (2, 16)
    with pytest.raises(ValueError, match=r"\[2, 24\] is not a multiple of 16"):
        nvfp4.encode(np.ones((2, 24), BFLOAT16), np.float32(1))


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_global_scale_must_be_positive_and_finite(scale):
    with pytest.raises(ValueError, match="global scale"):
        nvfp4.encode(np.ones((1, 16), BFLOAT16), np.float32(scale))


@pytest.mark.parametrize("largest", [np.nan, np.inf, -1.0])
def test_no_global_scale_comes_from_a_damaged_maximum(largest):
    with pytest.raises(ValueError, match="largest magnitude"):
        nvfp4.global_scale(largest)


def test_other_dtypes_and_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="float64"):
        nvfp4.encode(np.ones((1, 16)), np.float32(1))
    for maxima in (np.ones((1, 1), np.float32), np.full((2, 1), np.nan), np.full((2, 1), -1.0)):
        with pytest.raises(ValueError, match="block maxima"):
            nvfp4.encode(np.ones((2, 16), BFLOAT16), np.float32(1), maxima)
    with pytest.raises(ValueError, match="do not fit"):
        nvfp4.decode(np.zeros((2, 16), np.uint8), np.ones((2, 1), FLOAT8), np.float32(1))


def test_given_block_maxima_stand_in_for_the_blocks_own():
    values = np.full((1, 32), 6, np.float32)
    codes, scales = nvfp4.encode(values, np.float32(1), np.array([[12.0, 3.0]], np.float32))
    assert scales.astype(np.float32).tolist() == [[2, 0.5]]
    assert nvfp4.decode(codes, scales, np.float32(1))[0, ::16].tolist() == [6, 3]


def test_layout_and_alignment_in_memory_do_not_matter():
    values = weights("normal", BFLOAT16)
    raw = np.zeros(values.nbytes + 1, np.uint8)
    raw[1:] = values.reshape(-1).view(np.uint8)
    scale = nvfp4.global_scale(amax(values))
    codes, scales = nvfp4.encode(values, scale)
    for same in (raw[1:].view(BFLOAT16).reshape(values.shape), values.T.copy().T, values.reshape(4, 24, 512)):
        other = nvfp4.encode(same, scale)
        np.testing.assert_array_equal(other[0].reshape(codes.shape), codes)
        np.testing.assert_array_equal(other[1].reshape(scales.shape).view(np.uint8), scales.view(np.uint8))
        assert nvfp4.decode(*other, scale).shape == same.shape


def test_an_empty_tensor_is_no_exception():
    codes, scales = nvfp4.encode(np.ones((0, 32), BFLOAT16), np.float32(1))
    assert codes.shape == (0, 16) and scales.shape == (0, 2)
    assert nvfp4.decode(codes, scales, np.float32(1)).shape == (0, 32)


def test_slices_of_a_tensor_make_the_same_bytes_as_the_whole():
    values = np.random.default_rng(1).normal(size=(300, 1024)).astype(BFLOAT16)
    scale = nvfp4.global_scale(amax(values))
    whole, parts = nvfp4.encode(values, scale), [nvfp4.encode(values[i : i + 7], scale) for i in range(0, 300, 7)]
    np.testing.assert_array_equal(np.concatenate([codes for codes, _ in parts]), whole[0])
    joined = np.concatenate([scales.view(np.uint8) for _, scales in parts])
    np.testing.assert_array_equal(joined, whole[1].view(np.uint8))


@DTYPES
def test_memory_beyond_the_result_does_not_grow_with_the_tensor(dtype):
    values = np.random.default_rng(0).normal(size=(2048, 2048)).astype(dtype)
    tracemalloc.start()
    try:
        codes, scales = nvfp4.encode(values, np.float32(0.01))
        encoding = tracemalloc.get_traced_memory()[1] - codes.nbytes - scales.nbytes
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        decoded = nvfp4.decode(codes, scales, np.float32(0.01))
        decoding = tracemalloc.get_traced_memory()[1] - before - decoded.nbytes
    finally:
        tracemalloc.stop()
    assert encoding < 4e6 and decoding < 4e6
