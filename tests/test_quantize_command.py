"""`dflash-trt quantize` makes checkpoints that are read, refuses before it works, and goes on after a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_trt.checkpoint import load_tensor, read_draft, read_target, read_tensors
from dflash_trt.checkpoint.nvfp4 import decode
from dflash_trt.cli import INTERRUPTED, app
from dflash_trt.errors import DflashError
from dflash_trt.quantize import PRESETS, job, resume
from tests.tiny import edit_config, make_draft, make_pair, make_target

SHORT = ("--calib-samples", "4", "--calib-length", "128")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), "tiny-llama")


def quantize(output: Path, *options: object, target: Path | None = None, draft: Path | None = None) -> dict:
    """The report. Raises what the command line would print."""
    sources = [*(["--target", target] if target else []), *(["--draft", draft] if draft else [])]
    words = ["quantize", "--output", output, "--json", *sources, *options]
    result = CliRunner().invoke(app, list(map(str, words)), standalone_mode=False)
    if result.exception:
        raise result.exception
    if INTERRUPTED in (result.exit_code, result.return_value):
        raise KeyboardInterrupt
    return json.loads(result.stdout)


def message(*args, **kwargs) -> str:
    with pytest.raises(DflashError) as error:
        quantize(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4-weight-only", "nvfp4-mlp"])
@pytest.mark.parametrize("base", ["tiny-qwen3", "tiny-llama"])
def test_a_pair_becomes_a_pair_that_is_read(preset, base, tmp_path):
    target, draft = make_pair(tmp_path / "source", base)
    report = quantize(tmp_path / "out", "--preset", preset, *SHORT, target=target, draft=draft)
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text()) == report
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"target", "draft", "quantization_report.json"}
    read = {"target": read_target(tmp_path / "out/target"), "draft": read_draft(tmp_path / "out/draft")}
    for role, checkpoint in read.items():
        record = report["checkpoints"][role]
        assert record["preset"] == preset
        assert set(checkpoint.quantization.packed.values()) == {PRESETS[preset].activations}
        assert len(checkpoint.quantization.packed) == len(record["layers"])
        assert bool(record["calibration"]) == PRESETS[preset].activations
    assert (tmp_path / "out/target/tokenizer.json").exists()


def test_by_default_the_drafter_is_one_that_all_readers_load(pair, tmp_path):
    report = quantize(tmp_path / "out", *SHORT, target=pair[0], draft=pair[1])
    presets = {role: record["preset"] for role, record in report["checkpoints"].items()}
    assert presets == {"target": "nvfp4", "draft": "nvfp4-mlp"}
    assert not any(record["notes"] for record in report["checkpoints"].values())
    packed = {layer["module"].rpartition(".")[2] for layer in report["checkpoints"]["draft"]["layers"]}
    assert packed == {"o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "options, presets, words",
    [
        (("--preset", "nvfp4"), ("nvfp4", "nvfp4"), "k_proj, q_proj, v_proj packed:"),
        (("--draft-preset", "nvfp4"), ("nvfp4", "nvfp4"), "k_proj, q_proj, v_proj packed:"),
        (("--include", "fc"), ("nvfp4", "nvfp4-mlp"), "fc packed:"),
    ],
)
def test_a_drafter_that_some_cannot_load_is_noted(options, presets, words, pair, tmp_path):
    report = quantize(tmp_path / "out", *options, "--input-amax", "448", target=pair[0], draft=pair[1])
    target, draft = (report["checkpoints"][role] for role in ("target", "draft"))
    assert (target["preset"], draft["preset"]) == presets
    (note,) = draft["notes"]
    assert note.startswith(words) and "cannot load them packed; use nvfp4-mlp" in note and not target["notes"]


def test_each_of_the_pair_can_have_its_own_preset(pair, tmp_path):
    options = ("--preset", "nvfp4-weight-only", "--draft-preset", "nvfp4-mlp", *SHORT)
    records = quantize(tmp_path / "out", *options, target=pair[0], draft=pair[1])["checkpoints"]
    assert {role: record["preset"] for role, record in records.items()} == {
        "target": "nvfp4-weight-only", "draft": "nvfp4-mlp",
    }  # fmt: skip
    assert records["target"]["calibration"] is None and records["draft"]["calibration"]
    algos = read_target(tmp_path / "out/target").quantization.algo, read_draft(tmp_path / "out/draft").quantization.algo
    assert algos == ("W4A16_NVFP4", "NVFP4")


def test_a_pair_of_gpt_oss_goes_in_one_command(gptoss, tmp_path):
    draft = make_draft(tmp_path / "source", {"num_target_layers": 2, "dflash_config.target_layer_ids": [0, 1]})
    options = ("--preset", "nvfp4-experts", *SHORT)
    text = message(tmp_path / "out", *options, target=gptoss, draft=draft)
    assert "nvfp4-experts finds nothing" in text and "--draft-preset" in text and "--target-only" in text
    report = quantize(tmp_path / "out", *options, "--draft-preset", "nvfp4-mlp", target=gptoss, draft=draft)
    assert [record["preset"] for record in report["checkpoints"].values()] == ["nvfp4-mlp", "nvfp4-experts"]
    assert all(0 < layer["input_amax"] < 100 for record in report["checkpoints"].values() for layer in record["layers"])


@pytest.mark.parametrize("options", [("--preset", "nvfp4-weight-only"), ("--input-amax", "448")])
@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda draft: (draft / "mask_embedding.pt").touch(), "mask_embedding.pt (a mask embedding of its own)"),
        (lambda draft: edit_config(draft, set={"dflash_config.markov_rank": 8}), "DSpark"),
    ],
)
def test_a_drafter_that_no_engine_takes_is_refused_though_nothing_is_calibrated(options, damage, words, tmp_path):
    draft = make_draft(tmp_path / "source")
    damage(draft)
    assert words in message(tmp_path / "out", *options, draft=draft)
    assert not (tmp_path / "out").exists()


def test_a_target_is_no_drafter_nor_the_other_way_round(pair, tmp_path):
    options = ("--preset", "nvfp4-weight-only")
    assert "only DFlashDraftModel is read" in message(tmp_path / "out", *options, target=pair[0], draft=pair[0])
    assert "this is a drafter — --target" in message(tmp_path / "out", *options, target=pair[1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("only, role", [("--target-only", "target"), ("--draft-only", "draft")])
def test_one_of_the_pair_alone(only, role, pair, tmp_path):
    report = quantize(tmp_path / "out", only, *SHORT, target=pair[0], draft=pair[1])
    assert list(report["checkpoints"]) == [role]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {role, "quantization_report.json"}


def test_the_other_can_follow_with_another_preset(pair, tmp_path):
    quantize(tmp_path / "out", "--target-only", "--preset", "nvfp4-weight-only", target=pair[0])
    report = quantize(tmp_path / "out", "--draft-only", *SHORT, "--preset", "nvfp4-mlp", target=pair[0], draft=pair[1])
    assert {role: record["preset"] for role, record in report["checkpoints"].items()} == {
        "target": "nvfp4-weight-only", "draft": "nvfp4-mlp",
    }  # fmt: skip


def test_calibration_decides_input_scales_and_the_seed_decides_calibration(pair, tmp_path):
    target, draft = pair
    scales = []
    for number, seed in enumerate([1, 1, 2]):
        options = ("--draft-only", "--calib-samples", "4", "--seed", seed)
        quantize(tmp_path / str(number), *options, target=target, draft=draft)
        tensors = read_tensors(tmp_path / str(number) / "draft")
        scales.append({name: float(load_tensor(ref)) for name, ref in tensors.items() if name.endswith("input_scale")})
    assert scales[0] == scales[1] != scales[2]
    assert len(scales[0]) == 8 and all(0 < scale < 0.1 for scale in scales[0].values())


def test_a_fixed_input_amax_needs_neither_target_nor_calibration(pair, tmp_path):
    code = "import sys\nfor name in ('torch', 'transformers', 'modelopt'): sys.modules[name] = None\n"
    code += "from dflash_trt.cli import main; main()"
    words = ["quantize", "--draft", pair[1], "-o", tmp_path / "out", "--input-amax", "448", "--include", "fc"]
    result = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    tensors = read_tensors(tmp_path / "out/draft")
    scales = {float(load_tensor(ref)) for name, ref in tensors.items() if name.endswith("input_scale")}
    assert scales == {float(np.float32(448.0) / np.float32(2688.0))}
    assert "fc.input_scale" in tensors


def test_zero_blocks_and_rows_stay_exact_zeros(pair, tmp_path):
    draft = make_draft(tmp_path / "source")
    file = draft / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["layers.0.mlp.up_proj.weight"]
    weight[3], weight[5, 16:32] = 0, 0
    save_file(tensors, file, metadata={"format": "pt"})
    quantize(tmp_path / "out", "--draft-only", *SHORT, target=pair[0], draft=draft)
    packed = read_tensors(tmp_path / "out/draft")
    name = "layers.0.mlp.up_proj.weight"
    values = decode(*(load_tensor(packed[name + suffix]) for suffix in ("", "_scale", "_scale_2")))
    assert np.isfinite(values).all() and not values[3].any() and not values[5, 16:32].any()
    assert values[4].any()


@pytest.fixture(scope="module")
def gptoss(tmp_path_factory):
    """A gpt-oss whose experts are in MXFP4, as its publisher has them."""
    return make_target(tmp_path_factory.mktemp("gptoss"), "tiny-gptoss", {"num_hidden_layers": 2}, experts="mxfp4")


@pytest.mark.parametrize("options", [SHORT, ("--input-amax", "448")], ids=["calibrated", "fixed"])
def test_mxfp4_experts_are_cast_and_their_inputs_calibrated(options, gptoss, tmp_path):
    report = quantize(tmp_path / "out", "--preset", "nvfp4-experts", *options, target=gptoss)
    layers = report["checkpoints"]["target"]["layers"]
    assert [layer["changed"] for layer in layers] == [0] * 4
    tensors = read_tensors(tmp_path / "out/target")
    for layer in layers:
        scale = float(load_tensor(tensors[f"{layer['module']}_input_scale"]))
        assert scale == float(np.float32(layer["input_amax"]) / np.float32(2688.0))
        assert layer["input_amax"] == 448 if options != SHORT else 0 < layer["input_amax"] < 100
    assert read_target(tmp_path / "out/target").quantization.packed == {layer["module"]: True for layer in layers}


@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4-mlp", "nvfp4-weight-only"])
def test_float_experts_are_packed_with_the_layers_they_are_in(preset, tmp_path):
    target = make_target(tmp_path / "source", "tiny-gptoss", {"num_hidden_layers": 2})
    layers = quantize(tmp_path / "out", "--preset", preset, *SHORT, target=target)["checkpoints"]["target"]["layers"]
    read = read_target(tmp_path / "out/target")
    assert read.config.experts.storage == "nvfp4"
    assert read.quantization.packed == {layer["module"]: PRESETS[preset].activations for layer in layers}


def test_include_goes_to_the_checkpoint_that_has_the_module(pair, tmp_path):
    options = ("--include", "fc", "--include", "lm_head", *SHORT)
    report = quantize(tmp_path / "out", *options, target=pair[0], draft=pair[1])
    modules = {role: {x["module"] for x in record["layers"]} for role, record in report["checkpoints"].items()}
    assert "fc" in modules["draft"] and "lm_head" in modules["target"]


@pytest.mark.parametrize(
    "options, words",
    [
        (("--preset", "fp8"), "there is no preset 'fp8' — --preset — choose from nvfp4,"),
        (("--draft-preset", "fp8"), "there is no preset 'fp8' — --draft-preset — choose from nvfp4,"),
        (("--preset", "nvfp4-experts"), "nvfp4-experts finds nothing to quantize"),
        (("--target-only", "--draft-only"), "exclude each other"),
        (("--target-only", "--draft-preset", "nvfp4"), "no drafter is quantized — --draft-preset"),
        (("--include", "embed_tokens"), "embed_tokens cannot be quantized"),
        (("--target-only", "--include", "fc"), "there is no fc.weight"),
        (("--calib", "absent.jsonl"), "cannot read the calibration text: No such file"),
        (("--calib-samples", "1", "--calib-length", "100"), "has 100 tokens, at least 256 are needed — builtin"),
        (("--input-amax", "0"), "0.0 is not a magnitude"),
        (("--preset", "nvfp4-weight-only", "--input-amax", "3"), "nvfp4-weight-only leaves inputs as they are"),
        (("--input-amax", "1e39"), "1e+39 is not a magnitude"),
        (("--input-amax", "1e-44"), "1e-44 is not a magnitude"),
        (("--shard-size", "0"), "0.0 GiB are no size of a file"),
        (("--shard-size", "1e300"), "1e+300 GiB are no size of a file"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_loaded_or_made(options, words, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "calibrate", None)
    assert words in message(tmp_path / "out", *options, target=pair[0], draft=pair[1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.needs_cuda])
def test_presets_that_need_a_gpu_say_so(preset, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(job, "calibrate", None)
    text = message(tmp_path / "out", "--preset", preset, target=pair[0], draft=pair[1])
    assert f"{preset} needs an NVIDIA GPU" in text and "nvfp4-mlp" in text


def test_awq_is_for_the_target_of_a_pair_alone(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(job, "calibrate", None)
    text = message(tmp_path / "out", "--preset", "nvfp4-awq", target=pair[0], draft=pair[1])
    assert "nvfp4-awq is for targets alone" in text and "--draft-preset nvfp4-mlp" in text


def test_calibration_without_the_target_is_refused(pair, tmp_path):
    text = message(tmp_path / "out", draft=pair[1])
    assert "calibration needs the target" in text and "--input-amax" in text


def test_nothing_to_quantize_is_refused(tmp_path):
    assert "pass --target DIR" in message(tmp_path / "out")
    assert "--draft-only without --draft" in message(tmp_path / "out", "--draft-only", target=tmp_path)


def test_an_odd_width_is_named(tmp_path):
    target, draft = make_pair(tmp_path / "source", target_config={"intermediate_size": 100})
    text = message(tmp_path / "out", target=target, draft=draft)
    assert "down_proj" in text and "16" in text


def test_a_quantized_source_is_refused(pair, tmp_path):
    quantize(tmp_path / "out", "--preset", "nvfp4-weight-only", target=pair[0], draft=pair[1])
    text = message(tmp_path / "again", target=tmp_path / "out/target", draft=pair[1])
    assert "NVFP4" in text


def test_what_exists_is_replaced_with_force_alone(pair, tmp_path, monkeypatch):
    options = ("--preset", "nvfp4-weight-only", "--draft-only")
    quantize(tmp_path / "out", *options, draft=pair[1])
    with monkeypatch.context() as patch:
        patch.setattr(job, "calibrate", None)
        assert "--force" in message(tmp_path / "out", *SHORT, target=pair[0], draft=pair[1])
    report = quantize(tmp_path / "out", "--force", "--draft-only", *SHORT, target=pair[0], draft=pair[1])
    assert report["checkpoints"]["draft"]["preset"] == "nvfp4-mlp"


def test_what_is_not_a_quantized_checkpoint_is_never_replaced(pair, tmp_path):
    (tmp_path / "out/draft").mkdir(parents=True)
    (tmp_path / "out/draft/thesis.txt").write_text("years of work")
    assert "not a quantized checkpoint" in message(tmp_path / "out", "--force", target=pair[0], draft=pair[1])
    assert "lie in its own source" in message(pair[1].parent, "--force", target=pair[0], draft=pair[1])
    assert (tmp_path / "out/draft/thesis.txt").read_text() == "years of work"


def test_the_folder_above_the_output_must_exist(pair, tmp_path):
    text = message(tmp_path / "a/b", "--preset", "nvfp4-weight-only", draft=pair[1])
    assert f"mkdir -p {tmp_path / 'a'}" in text


def test_a_crash_while_writing_repeats_neither_calibration_nor_what_is_finished(pair, tmp_path, monkeypatch):
    target, draft = pair
    write = job.write_checkpoint

    def crash_at_the_target(plan, *args, **kwargs):
        if plan.source == target:
            raise KeyboardInterrupt
        return write(plan, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job, "write_checkpoint", crash_at_the_target)
        quantize(tmp_path / "out", *SHORT, target=target, draft=draft)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".quantize.json", "draft"]
    finished = (tmp_path / "out/draft/model.safetensors").stat().st_mtime_ns

    with monkeypatch.context() as patch:
        patch.setattr(job, "calibrate", None)
        report = quantize(tmp_path / "out", *SHORT, target=target, draft=draft)
    assert (tmp_path / "out/draft/model.safetensors").stat().st_mtime_ns == finished
    assert not (tmp_path / "out/.quantize.json").exists()
    whole = quantize(tmp_path / "whole", *SHORT, target=target, draft=draft)
    for role in ("target", "draft"):
        assert report["checkpoints"][role]["layers"] == whole["checkpoints"][role]["layers"]
        one, other = (tmp_path / name / role / "model.safetensors" for name in ("out", "whole"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("renamed", [True, False])
def test_a_kill_around_the_last_rename_makes_no_stranger_of_the_checkpoint(renamed, pair, tmp_path, monkeypatch):
    """The drafter is finished, and its state saved, just before or just after it gets its name."""
    out, options = tmp_path / "out", ("--preset", "nvfp4-weight-only")
    put = resume._put_in_place

    def die(*paths):
        if renamed:
            put(*paths)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(resume, "_put_in_place", die)
        quantize(out, *options, target=pair[0], draft=pair[1])
    assert (out / ".quantize.json").exists() and (out / "draft").exists() == renamed
    quantize(out, *options, target=pair[0], draft=pair[1])
    quantize(tmp_path / "whole", *options, target=pair[0], draft=pair[1])
    for role in ("target", "draft"):
        one, other = (folder / role / "model.safetensors" for folder in (out, tmp_path / "whole"))
        assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in out.iterdir()) == ["draft", "quantization_report.json", "target"]


def test_unfinished_work_of_another_run_is_told(pair, tmp_path):
    (tmp_path / "out/.target.quantizing").mkdir(parents=True)
    words = ["quantize", "--output", tmp_path / "out", "--draft", pair[1], "--preset", "nvfp4-weight-only"]
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0 and "unfinished work of another run lies in" in result.stderr


def test_files_that_nobody_reads_do_not_count(tmp_path, monkeypatch):
    draft = make_draft(tmp_path / "source")
    (draft / "link").symlink_to(tmp_path / "nowhere")
    (draft / "gone.json").symlink_to(tmp_path / "nowhere")
    options = ("--preset", "nvfp4-weight-only")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job, "save_report", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        quantize(tmp_path / "out", *options, draft=draft)
    (draft / ".DS_Store").touch()
    monkeypatch.setattr(job, "write_checkpoint", None)
    assert quantize(tmp_path / "out", *options, draft=draft)["checkpoints"]["draft"]["layers"]


def test_another_job_does_not_go_on_from_a_crash(pair, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(job, "write_checkpoint", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        quantize(tmp_path / "out", "--draft-only", *SHORT, target=pair[0], draft=pair[1])
    calls: list[object] = []
    calibrate = job.calibrate
    monkeypatch.setattr(job, "calibrate", lambda *args, **kwargs: calls.append(args) or calibrate(*args, **kwargs))
    quantize(tmp_path / "out", "--draft-only", *SHORT, "--seed", 1, target=pair[0], draft=pair[1])
    assert len(calls) == 1


def test_ctrl_c_in_calibration_leaves_nothing(pair, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "calibrate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "out", target=pair[0], draft=pair[1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["torch", "transformers", "modelopt"])
def test_a_missing_package_is_named_with_how_to_install_it(module, pair, tmp_path):
    code = f"import sys; sys.modules[{module!r}] = None; from dflash_trt.cli import main; main()"
    words = ["quantize", "--target", pair[0], "--draft", pair[1], "-o", tmp_path / "out"]
    result = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"{module} cannot be imported" in result.stderr and "pip install 'dflash-trt[quantize]'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_person_sees_tables_and_no_librarys_chatter(pair, tmp_path):
    words = ["quantize", "--target", pair[0], "--draft", pair[1], "-o", tmp_path / "out", *SHORT]
    command = [sys.executable, "-c", "from dflash_trt.cli import main; main()", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.count("✓") == 2 and "mlp.down_proj" in result.stdout
    assert "quantizers" not in result.stdout  # ModelOpt prints how many it inserted


def test_a_target_without_a_chat_template_reads_plain_text(tmp_path):
    target = make_target(tmp_path / "target")
    (target / "chat_template.jinja").unlink()
    assert quantize(tmp_path / "out", "--target-only", *SHORT, target=target)["checkpoints"]["target"]["layers"]


def test_a_missing_tokenizer_is_named(tmp_path):
    target = make_target(tmp_path / "target")
    for file in target.glob("tokenizer*"):
        file.unlink()
    assert "there is no tokenizer" in message(tmp_path / "out", target=target)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_number_is_a_seed(seed, pair, tmp_path):
    quantize(tmp_path / "out", "--draft-only", *SHORT, "--seed", seed, target=pair[0], draft=pair[1])


def test_weights_that_are_refused_leave_nothing(tmp_path):
    draft = make_draft(tmp_path / "source")
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    assert "norm.weight holds 1 NaN" in message(tmp_path / "out", "--preset", "nvfp4-weight-only", draft=draft)
    assert not (tmp_path / "out").exists()


def test_a_link_to_nowhere_is_no_output(pair, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert "not a folder" in message(tmp_path / "out" / "x", "--preset", "nvfp4-weight-only", draft=pair[1])
    assert "not a folder" in message(tmp_path / "out", "--preset", "nvfp4-weight-only", draft=pair[1])


def test_a_full_disk_is_told_wherever_it_is_met(pair, tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job.State, "save", full)
    text = message(tmp_path / "out", "--preset", "nvfp4-weight-only", draft=pair[1])
    assert f"No space left on device — {tmp_path / 'out'} — run the same command again" in text


def test_a_broken_tokenizer_is_named(tmp_path):
    target = make_target(tmp_path / "target")
    (target / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be read" in message(tmp_path / "out", target=target)
