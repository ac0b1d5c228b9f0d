"""What ModelOpt exports for AWQ is put in place whole, or the folder stays as it was. ModelOpt's part needs CUDA."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_trt.errors import DflashError, UserError
from dflash_trt.quantize import PRESETS, awq, make_plan, write_checkpoint
from tests.tiny import make_target


@pytest.fixture
def existing(tmp_path) -> tuple[Path, Path]:
    """(target, a quantized checkpoint of it)"""
    target = make_target(tmp_path / "target")
    write_checkpoint(make_plan(target, PRESETS["nvfp4-weight-only"]), tmp_path / "out", None)
    (tmp_path / "out/note").write_text("old")
    return target, tmp_path / "out"


def export(target: Path, output: Path, monkeypatch, *, force: bool, fail: BaseException | None = None):
    def write(model, export_dir: str) -> None:
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(target / name, Path(export_dir) / name)
        assert (output / "note").read_text() == "old"
        if fail:
            raise fail
        (Path(export_dir) / "hf_quant_config.json").write_text("{}")

    pair = SimpleNamespace(target=SimpleNamespace(model=None))
    monkeypatch.setattr(awq, "calibrate", lambda *args, **kwargs: (pair, {}))
    monkeypatch.setattr(awq, "load", lambda name: SimpleNamespace(export_hf_checkpoint=write))
    return awq.export_awq(make_plan(target, PRESETS["nvfp4-awq"]), output, [], force, lambda what, fraction: None)


def test_what_force_replaces_goes_when_the_new_one_is_complete(existing, monkeypatch):
    target, output = existing
    done = export(target, output, monkeypatch, force=True)
    assert done.path == output and done.bytes_after == done.bytes_before
    assert not (output / "note").exists() and (output / "tokenizer.json").exists()
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "target"]


@pytest.mark.parametrize("fail", [RuntimeError("no kernel"), KeyboardInterrupt(), OSError(28, "No space left")])
def test_an_export_that_fails_costs_nothing(existing, monkeypatch, fail):
    target, output = existing
    with pytest.raises((RuntimeError, DflashError)):
        export(target, output, monkeypatch, force=True, fail=fail)
    assert (output / "note").read_text() == "old" and (output / "hf_quant_config.json").exists()
    export(target, output, monkeypatch, force=True)
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "target"]


def test_without_force_it_stays(existing, monkeypatch):
    target, output = existing
    with pytest.raises(UserError, match="--force"):
        export(target, output, monkeypatch, force=False)
    assert (output / "note").read_text() == "old"
