"""The command line as a user meets it: quick help, one-line errors, exit codes, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomllib

from dflash_trt import __version__
from dflash_trt.cli import COMMANDS
from tests.tiny import make_pair

COMMAND = [sys.executable, "-c", "from dflash_trt.cli import main; main()"]
ROOT = Path(__file__).parents[1]


def run(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    target, draft = make_pair(tmp_path_factory.mktemp("cli"))
    return ["--target", str(target), "--draft", str(draft), "--max-batch", "2", "--max-seq-len", "64"]


def assert_one_line(answer: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert answer.returncode == code, answer.stderr
    assert answer.stdout == "" and answer.stderr.count("\n") == 1 and answer.stderr.startswith("error: ")
    for word in words:
        assert word in answer.stderr


def test_help_lists_every_command_without_loading_what_they_need():
    code = "import atexit, sys; atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))"
    command = [sys.executable, "-c", f"{code}; from dflash_trt.cli import main; main()", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert all(name in answer.stdout for name in COMMANDS)
    assert not {"numpy", "onnx", "onnx_ir", "onnxruntime", "tokenizers"} & set(answer.stderr.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_options(name):
    answer = run(name, "--help")
    assert (answer.returncode, answer.stderr) == (0, "") and "Options" in answer.stdout


def test_the_version_is_the_packages():
    assert run("--version").stdout == f"dflash-trt {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bild"], ["bild", "--help"]),
        (["build"], ["directory", "--help"]),
        (["build", "/absent", "--sm", "120"], ["no such directory", "/absent", "convert"]),
        (["build", "/absent", "--sm", "many"], ["--sm"]),
        (["convert", "--target", "/absent", "-o", "/tmp/never"], ["No such file", "/absent"]),
        (["convert", "--output", "/tmp/never"], ["--target"]),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(arguments, words):
    assert_one_line(run(*arguments), 2, *words)


def test_a_traceback_is_shown_only_when_asked_for():
    arguments = ["build", "/absent", "--sm", "120"]
    assert "Traceback" not in run(*arguments).stderr
    assert "Traceback" in run(*arguments, env=os.environ | {"DFLASH_TRT_TRACEBACK": "1"}).stderr


def test_convert_prints_the_manifest_for_scripts(pair, tmp_path):
    answer = run("convert", *pair, "-o", tmp_path / "engine", "--json")
    assert json.loads(answer.stdout) == json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert answer.stderr == ""


def test_an_existing_engine_directory_is_replaced_only_by_force(pair, tmp_path):
    assert run("convert", *pair, "-o", tmp_path / "engine").returncode == 0
    first = (tmp_path / "engine").stat().st_ino
    assert_one_line(run("convert", *pair, "-o", tmp_path / "engine"), 2, "exists", "--force")
    assert (tmp_path / "engine").stat().st_ino == first
    assert run("convert", *pair, "-o", tmp_path / "engine", "--force").returncode == 0
    assert (tmp_path / "engine").stat().st_ino != first and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("limit", [1000, 50_000])
def test_a_full_disk_is_one_line_with_exit_code_1_and_leaves_nothing(pair, tmp_path, limit):
    """A limit on file sizes stands for the full disk: the write fails in the same place, part of it done."""
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    answer = run("convert", *pair, "-o", tmp_path / "engine", **small)
    assert_one_line(answer, 1, "File too large", "nothing was changed")
    assert list(tmp_path.iterdir()) == []


def interrupt(arguments: list[object], when: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Send Ctrl-C as soon as `when` is true."""
    command = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not when():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_in_convert_leaves_nothing(pair, tmp_path):
    def staging() -> list[Path]:
        return list(tmp_path.iterdir())

    answer = interrupt(["convert", *pair, "-o", tmp_path / "engine"], staging)
    assert (answer.returncode, answer.stdout) == (130, "") and "Traceback" not in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_build_leaves_the_engine_directory_as_it_was(pair, tmp_path):
    assert run("convert", *pair, "-o", tmp_path / "engine").returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "engine").iterdir() if path.is_file()}

    def compiling() -> bool:
        lines = map(command_line, Path("/proc").glob("[0-9]*"))
        return any(b"worker" in line and bytes(tmp_path) in line for line in lines)

    answer = interrupt(["build", tmp_path / "engine", "--sm", "120"], compiling)
    assert (answer.returncode, answer.stdout) == (130, "") and "Traceback" not in answer.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "engine").iterdir() if path.is_file()} == before
    assert not compiling()


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_serve_without_its_packages_says_how_to_get_them():
    program = "import sys; sys.modules['uvicorn'] = None; from dflash_trt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "serve", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: uvicorn is not installed — serve — pip install 'dflash-trt[serve]'\n"


def test_every_folder_of_the_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [*(ROOT / "dflash_trt").rglob("__init__.py"), *(ROOT / "plugins").rglob("__init__.py")]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in files} | {"deploy", "build_recipes"}
    assert set(listed) == {name if name.startswith("dflash_trt") else f"dflash_trt.{name}" for name in found}
