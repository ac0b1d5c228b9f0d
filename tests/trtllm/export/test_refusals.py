"""What TensorRT-LLM's engine backend cannot hold is refused by name, with what to do; nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.errors import Failure, UserError
from dflash_trt.trtllm.export import directory, export_pair
from tests.packed import pack
from tests.tiny import edit_config, make_pair
from tests.trtllm.export.pairs import EIGHT, make, quantized
from tests.waiting import until

TWELVE = {"num_attention_heads": 12, "hidden_size": 96, "intermediate_size": 96}


@pytest.fixture
def pair(tmp_path):
    return make(tmp_path / "source", "tiny-qwen3")


def refused(target: Path, draft: Path, output: Path, match: str, **options: object) -> None:
    before = sorted(output.parent.iterdir())
    with pytest.raises(UserError, match=match):
        export_pair(target, draft, output, **options)
    assert sorted(output.parent.iterdir()) == before, "nothing is left behind"


@pytest.mark.parametrize(
    ("config", "tp", "match"),
    [
        ({}, 0, "0 is too small — --tp — give 1 or more"),
        ({}, 3, "8 attention heads of the target cannot be split over 3 ranks — --tp — choose --tp 1, 2, 4, 8"),
        ({}, 16, "8 attention heads of the target"),
        (TWELVE | {"num_key_value_heads": 4}, 12, "8 attention heads of the drafter .* choose --tp 1, 2, 4$"),
        (TWELVE | {"num_key_value_heads": 6}, 4, "6 key/value heads of the target"),
        ({"intermediate_size": 100}, 8, "the target's MLP of width 100 cannot be split over 8 ranks"),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_that_do_not_divide_the_networks(config, tp, match, tmp_path):
    target, draft = make(tmp_path / "source", "tiny-llama", target_config=config)
    refused(target, draft, tmp_path / "out", match, tp=tp)


def test_ranks_that_do_not_divide_the_drafter(tmp_path):
    target, draft = make(tmp_path / "source", "tiny-llama", draft_config={"num_attention_heads": 4})
    refused(target, draft, tmp_path / "out", "4 attention heads of the drafter .* choose --tp 1, 2, 4$", tp=8)


def test_a_cut_inside_a_block_of_scales(tmp_path):
    target, draft = make(tmp_path / "source", "tiny-llama", target_config={"intermediate_size": 192})
    target = quantized(target, tmp_path / "target")
    match = r"model\.layers\.0\.mlp\.down_proj's 192 NVFP4 inputs, in blocks of 16, cannot be split over 8 ranks"
    refused(target, draft, tmp_path / "out", f"{match} — --tp — choose --tp 1, 2, 4$", tp=8)


def test_heads_that_tensorrt_llms_qwen_would_mix_up(tmp_path):
    """Where queries and keys have equal heads under a norm, its attention takes qkv apart head by head."""
    target, draft = make(tmp_path / "source", "tiny-qwen3", target_config={"num_key_value_heads": 8})
    refused(target, draft, tmp_path / "out", "8 heads with as many keys and a norm over them.*choose --tp 8$", tp=2)
    export_pair(target, draft, tmp_path / "out", tp=8)  # one head a rank has one order


def test_gpt_oss_has_two_other_lanes(tmp_path):
    target, draft = make_pair(tmp_path / "source", "tiny-gptoss")
    match = "gpt_oss was never supported by TensorRT-LLM's engine backend.*dflash-trt recipe.*dflash-trt convert"
    refused(target, draft, tmp_path / "out", match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3, "layer_types": None},
            "layers with sliding windows",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "truncate": False,
                                 "original_max_position_embeddings": 64}},
            "YaRN with truncate false",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.5,
                                 "original_max_position_embeddings": 64}},
            "YaRN with attention_factor",
        ),
    ],
    ids=["windows", "truncate", "attention_factor"],
)  # fmt: skip
def test_networks_that_its_engines_do_not_compute(changes, match, pair, tmp_path):
    target, draft = pair
    edit_config(target, set=changes)
    refused(target, draft, tmp_path / "out", match)


def test_biases_of_qwen3(tmp_path):
    target, draft = make(tmp_path / "source", "tiny-qwen3", target_config={"attention_bias": True})
    refused(target, draft, tmp_path / "out", "attention_bias of Qwen3 includes o_proj")


def test_weights_in_nvfp4_without_their_inputs(pair, tmp_path):
    target, draft = pair
    pack(target, "*.mlp.*", activations=False)
    refused(target, draft, tmp_path / "out", "is NVFP4 without an input_scale.*--preset nvfp4 or nvfp4-mlp")


def test_half_packed_qkv(pair, tmp_path):
    target, draft = pair
    pack(target, "*.q_proj", "*.k_proj")
    refused(target, draft, tmp_path / "out", "q_proj is NVFP4 and .*v_proj is not.*quantize both or neither")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value, pair, tmp_path):
    target, draft = pair
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(target / "model.safetensors")
    tensors[name][3, 7] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    refused(target, draft, tmp_path / "out", rf"{name} holds .* the first at \[3, 7\]")


def test_values_beyond_float16(pair, tmp_path):
    target, draft = pair
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    match = r"model\.norm\.weight holds 999424, too large for F16.*--dtype bfloat16"
    refused(target, draft, tmp_path / "out", match, dtype="float16")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_batch": 0}, "0 is too small — --max-batch"),
        ({"max_seq_len": 0}, "0 is too small — --max-seq-len"),
        ({"max_seq_len": 5000}, "5000 tokens, but .* knows 4096 positions — --max-seq-len — give 4096 or less"),
        ({"max_seq_len": 7}, "7 tokens do not hold a block of 8 — --max-seq-len — give 8 or more"),
        ({"max_batch": 64, "max_num_tokens": 500}, "a step takes: 64 sequences x a block of 8.*give 512 or more"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_sizes_that_cannot_be_built(options, match, pair, tmp_path):
    refused(*pair, tmp_path / "out", match, **options)


def test_an_export_is_replaced_on_request_alone_and_only_after_success(pair, tmp_path):
    target, draft = pair
    output = tmp_path / "out"
    export_pair(target, draft, output)
    refused(target, draft, output, "export exists — .*/out — pass --force to replace it")
    first = (output / "target/config.json").read_bytes()
    with pytest.raises(UserError):
        export_pair(target, draft, output, tp=3, force=True)
    assert (output / "target/config.json").read_bytes() == first
    export_pair(target, draft, output, tp=2, force=True)
    assert (output / "target/rank1.safetensors").exists()
    (output / "notes.txt").write_text("mine")
    refused(target, draft, output, "holds what `export` did not write.*notes.txt", force=True)


@pytest.mark.parametrize("stranger", ["target/rank0.engine", "draft/notes/a.txt", "model_class/mine.py", "engines/x"])
def test_nothing_that_was_put_into_an_export_is_deleted(stranger, pair, tmp_path):
    output = tmp_path / "out"
    export_pair(*pair, output)
    (output / "model_class/__pycache__").mkdir()  # trtllm-build's
    file = output / stranger
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    where = "/".join(Path(stranger).parts[:2]) if not stranger.startswith("engines") else "engines"
    refused(*pair, output, rf"holds what `export` did not write.*out/{where} — move it away", force=True)
    shutil.move(output / where, tmp_path / "kept")
    export_pair(*pair, output, force=True)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_not_ours_is_never_replaced(kind, pair, tmp_path):
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    elif kind == "folder":
        output.mkdir()
        (output / "export").write_text("mine")
    else:
        output.symlink_to(pair[0])
    refused(*pair, output, "exists and is not an export of ours", force=True)


def test_an_empty_folder_is_filled_and_a_missing_one_above_it_named(pair, tmp_path):
    (tmp_path / "out").mkdir()
    export_pair(*pair, tmp_path / "out")
    with pytest.raises(UserError, match=r"no such folder — .*/missing — create it: mkdir -p"):
        export_pair(*pair, tmp_path / "missing/out")


def test_a_disk_that_is_too_small_is_noticed_before_it_is_full(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(Failure, match=r"[\d,]+ bytes are needed, 1 are free"):
        export_pair(*pair, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_disk_that_fills_up_leaves_nothing(pair, tmp_path):
    """A file may not grow beyond a limit here, which is how a full disk looks to a writer."""
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from dflash_trt.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.argv = ['dflash-trt', 'export', '--target', sys.argv[1], '--draft', sys.argv[2], '-o', sys.argv[3]]\n"
        "main()\n"
    )
    words = [sys.executable, "-c", program, *map(str, pair), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "nothing was changed" in done.stderr, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("stopped", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_the_former_export(stopped, pair, tmp_path):
    output = tmp_path / "out"
    export_pair(*pair, output)
    before = (output / "target/rank0.safetensors").read_bytes()
    program = (
        "import sys, time\n"
        "from dflash_trt.trtllm.export import write\n"
        "plain = write._stream\n"
        "write._stream = lambda *args: (time.sleep(0.2), plain(*args))\n"
        "from dflash_trt.cli import main\n"
        "sys.argv = ['dflash-trt', 'export', '--force', '--target', sys.argv[1], '--draft', sys.argv[2], "
        "'-o', sys.argv[3]]\n"
        "main()\n"
    )
    words = [sys.executable, "-c", program, *map(str, pair), str(output)]
    run = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob(".out.staging-*/target")))
    time.sleep(0.3)
    run.send_signal(stopped)
    assert run.wait(30) == 128 + stopped
    assert (output / "target/rank0.safetensors").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_what_a_killed_run_left_goes_with_the_next(pair, tmp_path):
    stale = tmp_path / ".out.staging-00000000"
    stale.mkdir()
    (stale / "half").write_text("")
    former = tmp_path / ".out.former-00000000"
    export_pair(*pair, former)
    with pytest.raises(UserError, match="export exists"):  # a run was killed between its two renames: undone
        export_pair(*pair, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_truncated_checkpoint_is_named(pair, tmp_path):
    target, draft = pair
    os.truncate(target / "model.safetensors", 100_000)
    refused(target, draft, tmp_path / "out", "the file is truncated")


def test_checkpoints_of_two_pairs(tmp_path):
    target, draft = make(tmp_path / "source", "tiny-llama", draft_config={"hidden_size": 32})
    refused(target, draft, tmp_path / "out", "hidden_size of the drafter is 32, the target has 64")


def test_a_drafter_that_is_no_checkpoint(pair, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(pair[0], tmp_path / "empty", tmp_path / "out", "config.json")


def test_odd_widths_of_a_target_are_split_where_they_divide(tmp_path):
    config = EIGHT | {"intermediate_size": 136, "vocab_size": 77}
    target, draft = make(tmp_path / "source", "tiny-llama", target_config=config,
                         draft_config={"dflash_config.mask_token_id": 76})  # fmt: skip
    made = export_pair(target, draft, tmp_path / "out", tp=4)
    tensors = load_file(tmp_path / "out/target/rank3.safetensors")
    assert tensors["lm_head.weight"].shape == (20, 64)
    assert not tensors["lm_head.weight"][-3:].any() and tensors["lm_head.weight"].dtype == torch.bfloat16
    assert made.tp == 4
