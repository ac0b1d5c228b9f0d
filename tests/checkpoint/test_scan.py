"""`scan` finds every NaN and Inf, says where, and holds no more than a few MiB."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint import NotFinite, read_tensors, scan
from dflash_trt.checkpoint.scan import CHUNK
from dflash_trt.checkpoint.weights import DTYPES
from tests.checkpoint.sparse import write_file

WITH_INF = {"F64", "F32", "F16", "BF16", "F8_E5M2"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scan")


def scan_array(directory: Path, values: np.ndarray, dtype: str) -> NotFinite | None:
    content = values.astype(DTYPES[dtype]).tobytes()
    file = write_file(directory / "model.safetensors", {"w": values.shape}, dtype)
    with file.open("r+b") as stream:
        stream.seek(-len(content), 2)
        stream.write(content)
    return scan(read_tensors(directory)["w"])


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
@settings(max_examples=30)
@given(st.data())
def test_counts_and_first_index_are_those_of_numpy(directory, dtype, data):
    values = data.draw(st.lists(st.sampled_from([1.0, 2.0, np.nan, np.inf, -np.inf]), min_size=6, max_size=6))
    if dtype not in WITH_INF:
        values = [np.nan if np.isinf(value) else value for value in values]
    array = np.array(values, np.float32).reshape(2, 3)
    found = scan_array(directory, array, dtype)
    bad = np.argwhere(~np.isfinite(array))
    if not len(bad):
        assert found is None
    else:
        assert found == NotFinite("w", np.isnan(array).sum(), np.isinf(array).sum(), tuple(bad[0]))


def test_the_largest_finite_values_are_finite(tmp_path):
    for dtype in ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        limits = ml_dtypes.finfo(DTYPES[dtype])
        assert scan_array(tmp_path, np.array([limits.max, limits.min, limits.smallest_subnormal]), dtype) is None


def test_integers_and_empty_tensors_are_finite_and_a_scalar_has_an_index(tmp_path):
    assert scan_array(tmp_path, np.array([-1]), "I64") is None
    assert scan_array(tmp_path, np.zeros((0, 3)), "F32") is None
    assert scan_array(tmp_path, np.array(np.nan), "F32") == NotFinite("w", 1, 0, ())


def test_a_fault_in_a_late_piece_is_found_in_bounded_memory(tmp_path):
    rows = 8 * CHUNK // 2 // 1024
    file = write_file(tmp_path / "model.safetensors", {"w": (rows, 1024)}, "BF16")
    with file.open("r+b") as stream:
        stream.seek(-2, 2)
        stream.write(np.array(np.nan, ml_dtypes.bfloat16).tobytes())
    ref = read_tensors(tmp_path)["w"]
    tracemalloc.start()
    assert scan(ref) == NotFinite("w", 1, 0, (rows - 1, 1023))
    assert tracemalloc.get_traced_memory()[1] < 4 * CHUNK
    tracemalloc.stop()


def test_a_finding_names_tensor_counts_and_index(tmp_path):
    safetensors.numpy.save_file({"fc.weight": np.array([[1, np.nan], [np.inf, 0]])}, tmp_path / "model.safetensors")
    assert str(scan(read_tensors(tmp_path)["fc.weight"])) == "fc.weight holds 1 NaN and 1 Inf, the first at [0, 1]"
