"""Every case of `nvfp4/` behaves as its file says, on the command line."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dflash_trt.checkpoint import load_tensor, nvfp4, read_draft, read_tensors
from dflash_trt.cli import main
from tests.cases import NVFP4, Case


def run(case: Case, tmp_path, monkeypatch, capfd):
    target, draft = case.write(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command = ["quantize", "--preset", case.quantize] if case.quantize else ["convert"]
    options = [*command, "--target", target, "--draft", draft, "--output", tmp_path / "output"]
    monkeypatch.setattr(sys, "argv", ["dflash-trt", *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code or 0, *capfd.readouterr(), before


@pytest.mark.parametrize("stem", [stem for stem, case in NVFP4.items() if case.refused])
def test_a_refused_case_names_the_fault_on_one_line_and_leaves_nothing(stem, tmp_path, monkeypatch, capfd):
    case = NVFP4[stem]
    code, out, err, before = run(case, tmp_path, monkeypatch, capfd)
    assert (code, out) == (2, "")
    assert err.strip().count("\n") == 0 and err.strip().startswith("error: ")
    assert not [word for word in case.refused if word.lower() not in err.lower()], err
    assert sorted(tmp_path.rglob("*")) == before


def test_zeros_stay_zeros_and_no_scale_is_nan(tmp_path, monkeypatch, capfd):
    case = NVFP4["zero-block"]
    code, _, err, _ = run(case, tmp_path, monkeypatch, capfd)
    assert code == 0, err
    tensors = read_draft(tmp_path / "output" / "draft").tensors
    source = read_tensors(tmp_path / "draft")
    for name, (row, begin, end) in case.zeros.items():
        codes, scales, scale = (load_tensor(tensors[name + part]) for part in ("", "_scale", "_scale_2"))
        values = nvfp4.decode(codes, scales, np.float32(scale))
        assert not np.isnan(scales.astype(np.float32)).any() and np.isfinite(values).all()
        assert not values[slice(None) if row is None else row, begin:end].any()
        assert values.any() == (row is not None)
        assert values.shape == source[name].shape
