"""`dflash-trt deploy triton`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.triton import start
from deploy.triton.dflash_triton.settings import Settings
from dflash_trt.cli import app
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import UserError
from dflash_trt.launcher import mpirun
from dflash_trt.serve.identity import identity
from tests.runtime.mpi import ROOT


def deploy(engine: Path, output: Path, *options: object) -> str:
    """What it prints."""
    done = CliRunner().invoke(app, ["deploy", "triton", str(engine), "-o", str(output), *map(str, options)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def settings_of(config: Path, **environment: str) -> Settings:
    """As the model reads them."""
    found = re.findall(r'key: "(\w+)", value: { string_value: ("(?:[^"\\]|\\.)*") }', config.read_text())
    return Settings.read({key: {"string_value": json.loads(value)} for key, value in found}, environment)


def test_a_repository_holds_all_that_triton_needs_and_says_how_to_start_it(engine, tmp_path):
    said = deploy(engine, tmp_path / "repository", "--name", "my-model.1")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    own = {f"1/dflash_triton/{path.name}" for path in (ROOT / "deploy/triton/dflash_triton").glob("*.py")}
    model = {f"my-model.1/{name}" for name in {"config.pbtxt", "1/model.py", *own}}
    assert files == {f"repository/{name}" for name in {"start.py", *model}}
    assert f"python {tmp_path}/repository/start.py" in said and "/v2/models/my-model.1/generate" in said
    settings = settings_of(tmp_path / "repository/my-model.1/config.pbtxt")
    name = identity(read_manifest(engine))
    assert settings == Settings(str(engine), 1, settings.command, (), "", 30.0, 256, name)
    assert re.fullmatch(r"target@[0-9a-f]{16}", name)
    assert Path(settings.command[0]).name == "dflash-trt"


def test_options_and_the_environment_reach_the_engine(parallel, tmp_path):
    options = ["--max-waiting", 7, "--grace", 1.5, "--json", "--", "--threads", 1, "--model-name", 'a "b" é']
    made = json.loads(deploy(parallel, tmp_path / "repository", *options))
    assert made["ranks"] == 2 and made["engine"] == str(parallel) and made["name"] == "dflash"
    config = tmp_path / "repository/dflash/config.pbtxt"
    settings = settings_of(config, DFLASH_TRT_COMMAND="/no/dflash-trt --x")
    words = settings.serve("/socket", 12)
    assert words[: words.index("/no/dflash-trt")] and set(words[: words.index("/no/dflash-trt")]) == set(
        mpirun(2).split()
    )
    assert words[words.index("/no/dflash-trt") :] == [
        *["/no/dflash-trt", "--x", "serve", str(parallel), "--socket", "/socket", "--no-http"],
        *["--parent", "12", "--json"],
        *["--max-waiting", "7", "--grace", "1.5", "--threads", "1", "--model-name", 'a "b" é'],
    ]
    assert settings_of(config, DFLASH_TRT_ENGINE="/elsewhere").engine == "/elsewhere"


def test_a_repository_is_replaced_only_if_told_to_and_only_if_it_is_one(engine, tmp_path):
    deploy(engine, tmp_path / "repository", "--name", "first")
    with pytest.raises(UserError, match=r"model repository exists — .* — pass --force"):
        deploy(engine, tmp_path / "repository")
    deploy(engine, tmp_path / "repository", "--force", "--socket", tmp_path / "s")
    assert sorted(path.name for path in (tmp_path / "repository").iterdir()) == ["dflash", "start.py"]
    assert settings_of(tmp_path / "repository/dflash/config.pbtxt").socket == str(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]
    with pytest.raises(UserError, match="exists and is not a model repository of ours"):
        deploy(engine, engine, "--force")
    made = tmp_path / "repository"
    for stranger in ("other-model/config.pbtxt", "dflash/1/notes.txt", "dflash/2/model.py", "engine/manifest.json"):
        (made / stranger).parent.mkdir(exist_ok=True)
        (made / stranger).write_text("mine")
        with pytest.raises(UserError, match="did not write"):
            deploy(engine, made, "--force")
        assert (made / stranger).read_text() == "mine"
        (made / stranger).unlink()
        if not any((made / stranger).parent.iterdir()):
            (made / stranger).parent.rmdir()
    deploy(engine, made, "--force")
    (tmp_path / "start.py").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a model repository of ours"):
        deploy(engine, tmp_path, "--force")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--name", "start.py"], "'start.py' is no name of a model"),
        (["--grace", "inf"], "grace is inf"),
        (["--", "--socket=/x"], "--socket=/x is the model's to choose"),
        (["--grace", "1e10"], "grace is 10000000000.0"),
        (["--", "--frobnicate"], "No such option: --frobnicate — options behind --"),
        (["--", "--help"], "No such option: --help — options behind --"),
        (["--", "-h"], "No such option: -h — options behind --"),
        (["--", "--model-name", "\udcff"], r"printable UTF-8 alone — arguments: --model-name '\udcff' — "),
        (["--name", "n" * 300], "the name has 300 characters — --name — "),
        (["--socket", "\udcff"], "printable UTF-8 alone — socket: "),
        (["--socket", "/tmp"], "this is a folder — /tmp — "),
        (["--name", "a/b"], "'a/b' is no name of a model — --name"),
        (["--name", ""], "'' is no name of a model"),
        (["--socket", "/" + 107 * "s"], "the name has more than 107 bytes"),
        (["--socket", "/s", "--", "--threads", "1"], "options are for a server that the model starts"),
    ],
)
def test_what_cannot_work_is_refused(engine, tmp_path, options, words):
    with pytest.raises(UserError) as refusal:
        deploy(engine, tmp_path / "repository", *options)
    assert words in str(refusal.value)
    with pytest.raises(UserError, match="not an engine directory"):
        deploy(tmp_path, tmp_path / "repository")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a b", "takes no path with ' ' — "),
        ("a'b", 'takes no path with "\'" — '),
        ('a"b', "takes no path with '\"' — "),
        ("$(reboot)", "takes no path with '$' — "),
        ("a\nb", r"the path has a line break — "),
        ("é", r"takes no path with '\xe9' — "),
        ("\udcff", r"takes no path with '\udcff' — "),
        ("n" * 240, "the name of the folder has more than 200 bytes — "),
        ("n" * 300, "File name too long — --output: "),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_path_that_triton_cannot_start_from_is_refused_in_one_line(engine, tmp_path, name, words):
    with pytest.raises(UserError) as refusal:
        deploy(engine, tmp_path / name)
    assert words in str(refusal.value) and "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["n" * 300, "a\nb", "\udcff"], ids=ascii)
def test_an_engine_with_a_path_that_cannot_be_is_refused_in_one_line(tmp_path, name):
    for command in (["deploy", "triton", f"/{name}", "-o", str(tmp_path / "r")], ["serve", f"/{name}"]):
        with pytest.raises(UserError) as refusal:
            CliRunner().invoke(app, command, catch_exceptions=False)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("option", ["--max-waiting", "--threads"])
def test_numbers_beyond_all_reason_are_wrong_usage(engine, tmp_path, option):
    options = [option, "9" * 30] if option == "--max-waiting" else ["--", option, "9" * 30]
    done = CliRunner().invoke(app, ["deploy", "triton", str(engine), "-o", str(tmp_path / "repository"), *options])
    assert done.exit_code == 2 or isinstance(done.exception, UserError)
    assert not list(tmp_path.iterdir())


def test_the_script_refuses_a_path_that_triton_cannot_start_from(engine, tmp_path):
    deploy(engine, tmp_path / "repository")
    moved = Path(shutil.copytree(tmp_path / "repository", tmp_path / "a b"))
    (tmp_path / "t mp").mkdir()
    for script, words, environment in [
        (moved, [], {}),
        (tmp_path / "repository", ["--", f"--model-repository={moved}"], {}),
        (tmp_path / "repository", [], {"TMPDIR": str(tmp_path / "t mp")}),
    ]:
        command = [sys.executable, str(script / "start.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("error: Triton's Python backend takes no path with ' ' — ")


@pytest.mark.parametrize("grace", [0, 1e-5, 0.1, 30, 1234567.5, 1e6, 1e9])
def test_the_grace_is_one_number_wherever_it_is_read(engine, tmp_path, grace):
    deploy(engine, tmp_path / "repository", "--grace", grace)
    settings = settings_of(tmp_path / "repository/dflash/config.pbtxt")
    words = settings.serve("/socket", 1)
    assert settings.grace == float(words[words.index("--grace") + 1]) == grace
    assert start.longest_grace([tmp_path / "repository"]) == math.ceil(grace)


def test_the_longest_grace_of_all_repositories_counts(engine, tmp_path):
    for name, grace in {"a": 5, "b": 70.5, "c": 20}.items():
        deploy(engine, tmp_path / name, "--grace", grace)
    further = [f"--model-repository={tmp_path}/b", "--log-verbose=1", "--model-store", f"{tmp_path}/c"]
    assert start.repositories(further)[1:] == [tmp_path / "b", tmp_path / "c"]
    assert start.longest_grace([tmp_path / "a", *start.repositories(further)]) == 71
    help_of_a = [sys.executable, str(tmp_path / "a/start.py"), "--help", "--", *further]
    assert "86)" in subprocess.run(help_of_a, capture_output=True, text=True).stdout, "and 15 seconds"


def test_without_any_tritonserver_the_script_says_where_it_looked(engine, tmp_path):
    deploy(engine, tmp_path / "repository")
    start = [sys.executable, str(tmp_path / "repository/start.py")]
    done = subprocess.run(start, capture_output=True, text=True, env=os.environ | {"PATH": "/usr/bin"})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(
        "error: there is no tritonserver — PATH, /opt/tritonserver, the wheel nvidia-pytriton"
    )
    assert "45)" in subprocess.run([*start, "--help"], capture_output=True, text=True).stdout, (
        "the grace and 15 seconds"
    )
