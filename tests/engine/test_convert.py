"""Converting refers to the checkpoints' bytes, checks what it is given and writes everything a reader needs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from dflash_trt.engine import build, convert, open_engine
from dflash_trt.errors import UserError
from tests.checkpoint.sparse import write_draft, write_target
from tests.tiny import make_pair

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
DFLASH = {
    "block_size": 16, "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip


def test_no_weight_is_copied(converted, pair):
    weights = sum(file.stat().st_size for folder in pair for file in folder.glob("*.safetensors"))
    written = sum(file.stat().st_size for file in converted.rglob("*") if not file.is_symlink())
    assert written < weights / 2
    assert {link.resolve() for link in converted.glob("weights/*")} == {f / "model.safetensors" for f in pair}


def test_the_manifest_tells_what_was_converted(converted):
    manifest = open_engine(converted).manifest
    assert (manifest.format, manifest.dtype, manifest.vocab, manifest.eos_ids) == ("1.2", "bfloat16", 256, (2,))
    assert (manifest.target.layers, manifest.target.kv_heads, manifest.target.head_dim) == (6, 2, 16)
    assert manifest.draft and manifest.draft.layers == 2
    assert vars(manifest.limits) == {"max_batch": 2, "max_seq_len": 64, "block_size": 8, "max_query": 16}
    assert set(manifest.files) == {path.name for path in converted.iterdir() if path.is_file()} - {"manifest.json"}


def test_tokenizer_files_come_along_unchanged(converted, pair):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (converted / name).read_bytes() == (pair[0] / name).read_bytes()


def test_lengths_default_to_what_both_models_can(pair, tmp_path):
    assert convert(*pair, tmp_path / "engine").limits.max_seq_len == 4096


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seq_len": 4097}, "max_seq_len 4097 is beyond max_position_embeddings 4096 .*config.json"),
        ({"max_seq_len": 0}, "--max-seq-len"),
        ({"max_batch": 0}, "--max-batch"),
        ({"max_query": -1}, "--max-query"),
        ({"dtype": "float8"}, "'float8' is not supported"),
        ({"block_size": 12}, "block"),
    ],
)
def test_limits_that_do_not_fit_are_refused_and_leave_nothing(pair, tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        convert(*pair, tmp_path / "engine", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_shorter_block_is_taken(pair, tmp_path):
    assert convert(*pair, tmp_path / "engine", block_size=4).limits.block_size == 4


def test_progress_ends_at_one(pair, tmp_path):
    told: list[tuple[str, float]] = []
    convert(*pair, tmp_path / "engine", progress=lambda *step: told.append(step))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[-1] == 1


def test_a_16_gb_target_and_an_8_layer_drafter_convert_in_half_a_minute_and_700_mb(tmp_path):
    target = write_target(tmp_path / "target", QWEN3_8B)
    draft = write_draft(tmp_path / "draft", QWEN3_8B | {"num_hidden_layers": 8} | DFLASH)
    assert (target / "model.safetensors").stat().st_size > 16e9
    # The child tells its own peak: what the kernel tells of children begins with their parent's.
    program = "import sys; from pathlib import Path; from dflash_trt.engine import convert; "
    program += "from dflash_trt.measure.memory import own_peak; convert(*map(Path, sys.argv[1:])); print(own_peak())"
    started = time.perf_counter()
    words = [sys.executable, "-c", program, target, draft, tmp_path / "engine"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 30
    assert int(done.stdout) < 700e6


def test_plugins_are_for_shapes_that_kernels_exist_for(tmp_path):
    narrow = make_pair(tmp_path / "narrow")
    with pytest.raises(UserError, match=r"plugins do not take heads of 16 .* 64, 128, 256"):
        convert(*narrow, tmp_path / "engine", ops="plugin")
    wide = make_pair(tmp_path / "wide", target_config={"head_dim": 64}, draft_config={"head_dim": 64})
    with pytest.raises(UserError, match=r"plugins do not compute in float32"):
        convert(*wide, tmp_path / "engine", ops="plugin", dtype="float32")
    with pytest.raises(UserError, match=r"ops 'fast' are not supported .* native or plugin"):
        convert(*wide, tmp_path / "engine", ops="fast")
    engine = convert(*wide, tmp_path / "engine", ops="plugin", max_seq_len=64)
    assert engine.manifest.ops == "plugin"
    with pytest.raises(UserError, match=r"tensorrt-rtx takes no plugins .* --ops native"):
        build(engine.path, sm=120)
