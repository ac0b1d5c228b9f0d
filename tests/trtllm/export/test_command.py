"""`dflash-trt export`: what it prints, what it writes beside the checkpoints, and how much memory it takes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_trt.cli import app
from dflash_trt.trtllm.export import export_pair
from tests.trtllm.export.pairs import make, quantized

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def run(*words: object) -> str:
    """What the command prints. Raises what it would end with."""
    result = CliRunner().invoke(app, ["export", *map(str, words)], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = make(root, "tiny-qwen3", dtype="float32")
    return quantized(target, root / "target4"), draft


def test_it_says_what_it_made_and_how_to_go_on(pair, tmp_path):
    target, draft = pair
    text = run("--target", target, "--draft", draft, "-o", tmp_path / "out", "--tp", 2, "--dtype", "bfloat16")
    assert "for TensorRT-LLM 1.2.1, bfloat16, 2 ranks" in text
    assert "target: Qwen3ForCausalLM, NVFP4, " in text and "draft: DFlashDraftModel, 23 tensors" in text
    assert "tensors are rounded from F32 to BF16: model.embed_tokens.weight, " in text
    assert f"sh {tmp_path}/out/build.sh ENGINES" in text


def test_json_is_the_report_that_is_written(pair, tmp_path):
    target, draft = pair
    words = ("--target", target, "--draft", draft, "-o", tmp_path / "out", "--json", "--max-batch", 4)
    report = json.loads(run(*words))
    assert report == json.loads((tmp_path / "out/export.json").read_text())
    assert report["limits"] == {"batch": 4, "sequence": 4096, "tokens": 8192}
    assert report["networks"]["target"]["quantization"] == "NVFP4"
    assert report["networks"]["draft"]["architecture"] == "DFlashDraftModel"


def test_the_shell_takes_the_words_that_trtllm_build_is_given(pair, tmp_path):
    """A program of that name writes down what it gets."""
    target, draft = pair
    output, tools = tmp_path / "an export", tmp_path / "tools"
    export_pair(target, draft, output, tp=2, max_batch=16, max_seq_len=2048, max_num_tokens=4096, block_size=4)
    tools.mkdir()
    (tools / "trtllm-build").write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$@" END >> "{tmp_path}/words"\n')
    (tools / "trtllm-build").chmod(0o755)
    script = output / "build.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run([script, "engines", "--log_level", "warning"], check=True, env=environment, cwd=tmp_path)
    calls = [call.split("\n") for call in (tmp_path / "words").read_text().removesuffix("\nEND\n").split("\nEND\n")]
    options = [dict(zip(call[::2], call[1::2], strict=True)) for call in calls]
    common = {"--max_batch_size": "16", "--max_input_len": "2048", "--max_seq_len": "2048", "--max_num_tokens": "4096",
              "--workers": "1", "--log_level": "warning"}  # fmt: skip
    for role, name, given in zip(("target", "draft"), ("DFlashQwen3", "DFlashDraftModel"), options, strict=True):
        assert given.items() >= common.items()
        assert given["--checkpoint_dir"] == str(output / role) and given["--output_dir"] == f"engines/{role}"
        assert given["--model_cls_file"] == str(output / "model_class" / f"{role}.py")
        assert given["--model_cls_name"] == name and f"class {name}(" in Path(given["--model_cls_file"]).read_text()
    assert [given["--gemm_plugin"] for given in options] == ["nvfp4", "float32"]
    target_only = {"--speculative_decoding_mode": "draft_tokens_external", "--max_draft_len": "3"}
    assert options[0].items() >= target_only.items() and not options[1].keys() & target_only.keys()
    assert subprocess.run(["sh", script], capture_output=True, text=True).stderr.endswith(
        "[more options of trtllm-build]\n"
    )


def test_engines_never_overwrite_the_checkpoints_they_are_built_of(pair, tmp_path):
    """An engine's folder has a config.json of its own."""
    export_pair(*pair, tmp_path / "out")
    before = (tmp_path / "out/target/config.json").read_bytes()
    (tmp_path / "trtllm-build").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "trtllm-build").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for engines, code in {"out": 2, ".": 0}.items():
        words = ["sh", "out/build.sh", engines]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == code and ("name another folder" in done.stderr) == bool(code)
    assert (tmp_path / "out/target/config.json").read_bytes() == before


def test_a_path_is_printed_as_it_is(pair, tmp_path):
    target, draft = pair
    assert f"{tmp_path}/a[red]b: for" in run("--target", target, "--draft", draft, "-o", tmp_path / "a[red]b")


def test_the_script_is_clean_and_the_readme_shows_it(pair, tmp_path):
    export_pair(*pair, tmp_path / "out")
    script = tmp_path / "out/build.sh"
    done = subprocess.run([SHELLCHECK, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    readme = (tmp_path / "out/README.md").read_text()
    commands = script.read_text().partition("\nfi\n")[2].replace(' \\\n  "$@"', "").strip()
    assert commands in readme and "never executed" in readme


def test_memory_stays_below_a_few_pieces_of_what_is_read(tmp_path):
    """Of more than 100 MB, of which the largest tensor has 16."""
    wide = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2}
    target, draft = make(tmp_path / "source", "tiny-llama", target_config=wide,
                         draft_config={"dflash_config.target_layer_ids": [0, 1], "num_hidden_layers": 1,
                                       "layer_types": ["full_attention"]})  # fmt: skip
    total = sum(file.stat().st_size for file in (tmp_path / "source").rglob("*.safetensors"))
    assert total > 100e6
    tracemalloc.start()
    export_pair(target, draft, tmp_path / "out", tp=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6, f"{peak:,} bytes of {total:,}"


def test_a_plain_installation_needs_no_tensorrt_llm():
    program = "import sys, dflash_trt.commands.export; sys.exit(any('tensorrt_llm' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
