"""The report says what was quantized, how well, and what it came to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
from dflash_trt.quantize.report import NAME, describe, save_report, show_report
from tests.tiny import make_draft


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    plan = make_plan(make_draft(root / "source"), PRESETS["nvfp4-mlp"])
    return plan, write_checkpoint(plan, root / "draft", None, input_amax=448.0)


@pytest.fixture
def record(written):
    return describe("draft", *written, calibration=None, input_amax=448.0)


def test_every_layer_is_there_with_its_amaxes_error_and_outlier(record, written):
    assert [layer["module"] for layer in record["layers"]] == [linear.module for linear in written[0].linears]
    for layer in record["layers"]:
        assert layer.keys() == {"module", "amax", "input_amax", "error", "outlier"}
        assert layer["input_amax"] == 448.0
        assert 0.08 < layer["error"] < 0.11  # what NVFP4 costs on Gaussian weights
        assert 3 < layer["outlier"] < 6


def test_sizes_are_those_of_the_files(record, written):
    stored = {path: path.stat().st_size for path in written[1].path.glob("*.safetensors")}
    assert 0 < sum(stored.values()) - record["bytes_after"] < 20_000  # the header
    assert record["quantized_bytes_after"] / record["quantized_bytes_before"] < 0.30
    assert record["bytes_before"] - record["quantized_bytes_before"] == (
        record["bytes_after"] - record["quantized_bytes_after"]
    )


def test_modules_left_alone_are_those_of_the_file(record):
    names = [f"layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "kqv"]
    assert record["left_alone"] == ["fc", *names]


def test_notes_are_for_the_owner_and_yellow(written, record):
    plan, done = written
    assert record["notes"] == []
    silent = [replace(layer, input_amax=0.0) for layer in done.layers]
    untested = replace(plan, preset=PRESETS["nvfp4-mse"])
    record = describe("draft", untested, replace(done, layers=tuple(silent)), calibration=None, input_amax=None)
    untested_note, zeros = record["notes"]
    assert "nvfp4-mse" in untested_note and "need CUDA and are untested" in untested_note
    assert zeros.startswith(f"{silent[0].module} and {len(silent) - 1} more saw only zeros")
    console = Console(width=80, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    show_report(console, {"draft": record})
    assert f"\x1b[33m  {zeros}" in console.export_text(styles=True)


def test_a_second_checkpoint_joins_the_report_and_a_removed_one_leaves_it(record, tmp_path):
    for role in ("draft", "target"):
        (tmp_path / role).mkdir()
    save_report(tmp_path, {"draft": record})
    report = save_report(tmp_path, {"target": record | {"preset": "other"}})
    assert list(report["checkpoints"]) == ["draft", "target"]
    assert json.loads((tmp_path / NAME).read_text()) == report
    (tmp_path / "draft").rmdir()
    assert list(save_report(tmp_path, {"target": record})["checkpoints"]) == ["target"]


@pytest.mark.parametrize("damage", ["{", "[]", '{"checkpoints": 3}'])
def test_a_damaged_report_is_replaced(damage, record, tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / NAME).write_text(damage)
    assert list(save_report(tmp_path, {"draft": record})["checkpoints"]) == ["draft"]


def test_the_table_has_a_row_for_each_kind_of_projection_and_fits_a_terminal(record):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    calibrated = record | {"calibration": {"text": "builtin", "texts": 64, "tokens": 13739, "seed": 0}}
    show_report(console, {"draft": record, "target": calibrated})
    lines = console.export_text().splitlines()
    rows = [line for line in lines if "mlp.gate_proj" in line]
    assert len(rows) == 2 and all(cell in rows[0] for cell in (" 2 ", " 448 ", "9."))
    assert any("every input's amax set to 448" in line for line in lines)
    assert any("calibrated on 64 texts, 13,739 tokens" in line for line in lines)
    assert any("left alone: fc, 2 self_attn.k_proj" in line for line in lines)
    assert not any("…" in line for line in lines)
