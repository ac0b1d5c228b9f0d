"""`dflash-trt recipe`: what it prints, writes and refuses, and how it starts a launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_trt.cli import main
from dflash_trt.recipes import read_recipe, recipe_files

NAME = "gpt-oss-120b-b300x8-interactive"
COMMAND = [sys.executable, "-c", "from dflash_trt.cli import main; main()", "recipe"]


@pytest.fixture
def recipe(capfd, monkeypatch):
    """Runs the command line in this process; gives its exit code and what it wrote."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-trt", "recipe", *map(str, words)])
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGTERM, handler)
        code = ended.value.code
        return (code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


@pytest.fixture
def models(tmp_path) -> list[object]:
    """Folders that are there; what is in them is for the launcher."""
    words: list[object] = []
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        words += [f"--{role}", tmp_path / role]
    return words


def test_list_names_all_and_says_why_some_do_not_work(recipe):
    code, out, err = recipe("list")
    assert (code, err) == (0, "")
    assert all(name in out for name in recipe_files())
    assert "kimi-k2.6-b200x8-latency is not supported: TensorRT-LLM's support matrix" in " ".join(out.split())
    listed = json.loads(recipe("list", "--json")[1])
    assert [one["name"] for one in listed] == list(recipe_files())
    assert {one["lane"] for one in listed} == {"serve"}


def test_show_tells_what_a_recipe_says(recipe):
    code, out, _ = recipe("show", NAME)
    assert code == 0 and "openai/gpt-oss-120b" in out and "64 requests, 65,536 tokens each" in out
    shown = json.loads(recipe("show", NAME, "--json")[1])
    assert shown["gpus"] == "B300x8" and shown["limits"] == {"batch": 64, "sequence": 65536, "tokens": 16384}


def test_render_writes_a_folder_and_overwrites_only_its_own(recipe, tmp_path):
    output = tmp_path / "made of it"
    code, out, _ = recipe("render", NAME, "--output", output, "--draft", tmp_path / "a drafter", "--json")
    assert code == 0 and set(json.loads(out)["files"]) >= {
        "config.yaml",
        "mpirun.sh",
        "triton/tensorrt_llm/1/model.yaml",
    }
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["speculative_config"]["speculative_model"] == str(tmp_path / "a drafter")
    assert os.access(output / "mpirun.sh", os.X_OK)

    code, _, err = recipe("render", NAME, "--output", output)
    assert code == 2 and "pass --force to overwrite its files" in err
    (output / "triton/tensorrt_llm/1/model.py").write_text("NVIDIA's")
    assert recipe("render", NAME, "--output", output, "--force")[0] == 0
    assert (output / "triton/tensorrt_llm/1/model.py").read_text() == "NVIDIA's"
    assert "/models/z-lab" in (output / "config.yaml").read_text()
    assert not [path for path in tmp_path.iterdir() if path != output]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.sh").write_text("mine")
    code, _, err = recipe("render", NAME, "--output", tmp_path / "mine", "--force")
    assert code == 2 and "is not a rendered recipe" in err


@pytest.mark.parametrize("way", ["triton", "serve.sh"])
def test_what_is_in_the_way_of_a_file_is_told_before_one_is_replaced(recipe, tmp_path, way):
    output = tmp_path / "made"
    assert recipe("render", NAME, "--output", output)[0] == 0
    if way == "triton":
        shutil.rmtree(output / way)
        (output / way).touch()
    else:
        (output / way).unlink()
        (output / way).mkdir()
    (output / "config.yaml").write_text("mine")
    code, _, err = recipe("render", NAME, "--output", output, "--force")
    assert code == 2 and f"is in the way — {output / way} — remove it" in err
    assert (output / "config.yaml").read_text() == "mine"


def test_launch_says_every_reason_why_it_would_fail(recipe):
    code, out, err = recipe("launch", NAME)
    assert (code, out) == (2, "")
    assert "would fail, 2 reasons:" in err and "hf download openai/gpt-oss-120b --local-dir /models" in err


def test_launch_stops_at_what_preflight_finds(recipe, tmp_path, models):
    text = recipe_files()[NAME].read_text().replace("gpus: B300x8", "gpus: RTX PRO 6000x8")
    (tmp_path / f"{NAME}.yaml").write_text(text)
    code, _, err = recipe("launch", tmp_path / f"{NAME}.yaml", "--dry-run")
    assert code == 2 and "would fail" in err and "SM100" in err and "line 17" in err


def test_launch_tells_misspelt_keys_and_all_else_at_once(recipe, tmp_path):
    text = recipe_files()[NAME].read_text().replace("gpus: B300x8", "gpus: RTX PRO 6000x8")
    file = tmp_path / f"{NAME}.yaml"
    file.write_text(text.replace("enable_chunked_prefill", "enable_chunked_prefil"))
    code, _, err = recipe("launch", file, "--dry-run")
    assert code == 2 and "would fail, 3 reasons" in err and "SM100" in err
    assert "DF000 line 36: enable_chunked_prefil is not a known key — did you mean enable_chunked_prefill?" in err
    file.write_text(text.replace("options:", "options:\n  max_batch_size: 3\n  max_batch_siz: 3"))
    code, _, err = recipe("launch", file, "--dry-run")
    assert code == 2 and "2 problems" in err and "line 36: options.max_batch_size is what limits.batch says" in err


def test_launchers_that_need_a_folder_that_stays_are_refused(recipe, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for launcher, said in [("triton", "model.py has to be copied"), ("slurm", "outside of a job: a folder is needed")]:
        code, _, err = recipe("launch", NAME, "--launcher", launcher, "--server", "true")
        assert code == 2 and said in err and f"dflash-trt recipe render {NAME} --output DIR" in err
    assert recipe("launch", NAME, "--launcher", "triton", "--dry-run")[0] == 0


def test_another_release_is_asked_for_its_own_image(recipe, tmp_path):
    assert recipe("render", NAME, "--release", "1.3.0rc27", "--output", tmp_path / "made")[0] == 0
    assert "IMAGE=${IMAGE:-nvidia/tensorrt-llm/release:1.3.0rc27}" in (tmp_path / "made/settings.sh").read_text()


def test_json_is_json_whatever_yaml_knows(recipe, tmp_path):
    text = recipe_files()[NAME].read_text()
    odd = "options:\n  scheduler_config: {a: .nan, 2026-01-01: -.inf, null: 2026-01-01, b: [!!binary aGk=]}"
    (tmp_path / f"{NAME}.yaml").write_text(text.replace("options:", odd))
    code, out, _ = recipe("show", tmp_path / f"{NAME}.yaml", "--json")

    def strict(constant: str) -> None:
        raise AssertionError(constant)

    shown = json.loads(out, parse_constant=strict)["options"]["scheduler_config"]
    assert code == 0 and shown == {"a": "nan", "2026-01-01": "-inf", "None": "2026-01-01", "b": ["b'hi'"]}


def test_a_dry_run_prints_every_file(recipe, models):
    code, out, _ = recipe("launch", NAME, "--dry-run", "--launcher", "mpirun", "--json")
    shown = json.loads(out)
    assert code == 0 and shown["start"] == "mpirun.sh" and shown["start"] in shown["files"]
    code, out, _ = recipe("launch", NAME, "--dry-run")
    assert code == 0 and out.count("==> ") == len(shown["files"]) and out.endswith("would run: bash serve.sh\n")


def test_launch_becomes_the_launcher(tmp_path):
    """Its exit code is that of the launcher, which removes what was made for it."""
    words = [*COMMAND, "launch", NAME, "--server", 'bash -c \'printf "<%s>" "$0" "$@"; exit 9\'', "--port", "8123"]
    own = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (9, "<--host><127.0.0.1><--port><8123>")
    assert "it ended with 9 before it answered" in done.stderr and not list(tmp_path.iterdir())


def test_what_launch_checked_is_what_it_serves():
    own = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TARGET": "/another"}
    own["SERVER_COMMAND"] = "bash -c 'echo $TARGET'"  # as good as --server
    words = [*COMMAND, "launch", NAME, "--port", "8124"]
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=60)
    assert done.stdout == "/models/openai/gpt-oss-120b\n", done.stderr


def test_what_was_made_for_a_launch_goes_where_it_cannot_start(tmp_path):
    own = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/nowhere"}
    words = [*COMMAND, "launch", NAME, "--server", "true"]
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "No such file" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", NAME], "a name does nothing here"),
        (["list", "--force"], "--force does nothing here"),
        (["show"], "which recipe?"),
        (["show", NAME, "--output", "x"], "--output does nothing here"),
        (["render", NAME], "pass --output"),
        (["render", NAME, "--output", "/no/such/folder"], "no such folder"),
        (["render", NAME, "--output", "x", "--dry-run"], "--dry-run does nothing here"),
        (["show", "gpt-oss-120b-b300x8-interactiv"], f"did you mean {NAME}?"),
        (["render", NAME, "--release", "1.2.1", "--output", "x"], "no table for TensorRT-LLM 1.2.1"),
        (["render", NAME, "--release", "1.3.0rc20", "--output", "x"], "1.3.0rc20 has no speculative_config.attention"),
        (["launch", "kimi-k2.6-b200x8-latency"], "does not work today: TensorRT-LLM's support matrix says No"),
        (["launch", NAME, "--launcher", "ssh"], "'ssh' is not one of"),
        (["launch", NAME, "--server", " "], "no command — --server"),
        (["show", NAME, "--release", "9"], "no table for TensorRT-LLM 9 — --release"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(recipe, words, said):
    code, out, err = recipe(*words)
    assert (code, out) == (2, "") and said in err


def test_all_mistakes_of_a_recipe_are_told_with_their_lines(recipe, tmp_path):
    text = recipe_files()[NAME].read_text()
    for old, new in (("batch: 64", "batch: 64 users"), ("fraction: 0.8", "fraction: 80%"), ("ep: 1", "ep: 3")):
        text = text.replace(old, new)
    (tmp_path / f"{NAME}.yaml").write_text(text + "stream_interva: 3\n")
    lines = [number for number, line in enumerate((tmp_path / f"{NAME}.yaml").read_text().splitlines(), 1)
             if line.lstrip().startswith(("batch:", "fraction:", "ep:", "stream_interva:"))]  # fmt: skip
    code, _, err = recipe("show", tmp_path / f"{NAME}.yaml")
    assert code == 2 and "4 problems" in err
    assert [line.split(":")[0].strip() for line in err.splitlines()[1:]] == [f"line {number}" for number in lines]
    assert read_recipe(NAME)  # the one that comes with the package is as it was
