"""The launchers of a rendered recipe, run with our own server on a CPU in the place of trtllm-serve."""

from __future__ import annotations

import csv
import json
import os
import pty
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.recipes import read_recipe, recipe_files
from dflash_trt.trtllm.folder import fill_folder
from dflash_trt.trtllm.launch import LAUNCHERS, SCRIPTS, render_folder
from tests.runtime.mpi import CLI, ENVIRONMENT
from tests.trtllm.slurm import Cluster, missing
from tests.waiting import until

NAME = "gpt-oss-120b-b300x8-interactive"
SERVED = [name for name in recipe_files() if not read_recipe(name).recipe.unsupported]
SETTINGS = (
    "TARGET",
    "DRAFT",
    "HOST",
    "PORT",
    "GRACE",
    "START_TIMEOUT",
    "IMAGE",
    "SERVER_COMMAND",
    "RANKS",
    "STARTED_IN",
)
BINARIES = Path(sys.executable).parent
# Answers /health and ends for nobody, or for the first signal.
STUBBORN = """\
import http.server, signal, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words): pass
signal.signal(signal.SIGTERM, signal.SIG_IGN if "--stay" in sys.argv else lambda *_: sys.exit(7))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Health).serve_forever()
"""


def environment(**variables: object) -> dict[str, str]:
    """Without what the caller's environment sets of ours, and with mpirun in PATH."""
    clean = {
        name: value for name, value in os.environ.items() if name not in SETTINGS and not name.startswith("SLURM_")
    }
    own = {"PATH": f"{BINARIES}:{os.environ['PATH']}"} | {name: str(value) for name, value in variables.items()}
    return clean | ENVIRONMENT | own


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """There is a space in its path."""
    folder = tmp_path_factory.mktemp("rendered") / "a recipe"
    fill_folder(render_folder(read_recipe(NAME)).files, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Folders that look like checkpoints; there are spaces and quotes in their paths."""
    made = {}
    for variable in ("TARGET", "DRAFT"):
        made[variable] = tmp_path_factory.mktemp("models") / f'{variable.lower()} "a" $b'
        made[variable].mkdir()
        (made[variable] / "config.json").write_text("{}")
        (made[variable] / "model.safetensors").touch()
    return made


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Path:
    """`one` and `two ranks`."""
    from dflash_trt.engine import convert
    from tests.tiny import make_pair

    pair = make_pair(tmp_path_factory.mktemp("pair"), words=2, seed=6)
    place = tmp_path_factory.mktemp("engines")
    convert(*pair, place / "one", max_batch=2, max_seq_len=256)
    convert(*pair, place / "two ranks", max_batch=2, max_seq_len=256, tp=2)
    return place


def our_server(engine: Path) -> str:
    return shlex.join([*CLI, "serve", str(engine), "--threads", "1"])


class Launched:
    """A launcher as a process; ended with what it started if it is not when the block is left."""

    def __init__(self, *words: object, **variables: object):
        self.port = int(str(variables.setdefault("PORT", free_port())))
        self.process = subprocess.Popen(
            [*map(str, words)], env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said = ""

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.terminate()  # asked twice: no grace
        self.process.communicate(timeout=60)

    def until_ready(self) -> None:
        assert self.process.stderr
        while "ready after" not in self.said:
            line = self.process.stderr.readline()
            assert line, f"it ended with {self.process.wait(20)}: {self.said}"
            self.said += line

    def complete(self) -> Any:
        body = json.dumps({"prompt": "one", "max_tokens": 4}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, self.said + rest


def refused(*words: object, **variables: object) -> tuple[int, str]:
    variables.setdefault("PORT", free_port())
    done = subprocess.run([*map(str, words)], env=environment(**variables), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


# -- as text ---------------------------------------------------------------------------------------------------------


def shellcheck(*scripts: Path) -> str:
    words = [BINARIES / "shellcheck", "--external-sources", *scripts]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_every_script_passes_bash_and_shellcheck(folder, tmp_path):
    """Of all recipes the settings, which alone differ; the rest once."""
    scripts = sorted([*folder.glob("*.sh"), *folder.glob("*.sbatch")])
    assert len(scripts) == len(LAUNCHERS) + 3
    for name in SERVED:
        (tmp_path / f"{name}.sh").write_text(render_folder(read_recipe(name)).files["settings.sh"])
        scripts.append(tmp_path / f"{name}.sh")
    assert shellcheck(*scripts) == ""
    for script in scripts:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_only_slurms_head_is_filled_in():
    files = render_folder(read_recipe(NAME)).files
    for name in ("serve.sh", "mpirun.sh", "docker.sh", "triton.sh", "server.sh", "common.sh"):
        assert files[name] == (SCRIPTS / name).read_text()
    head = [line for line in files["slurm.sbatch"].splitlines() if line.startswith("#SBATCH")]
    assert f"#SBATCH --job-name={NAME}" in head and "#SBATCH --ntasks-per-node=8" in head
    assert "#SBATCH --nodes=1" in head and not any("@" in line.removesuffix("B:TERM@120") for line in head)


@given(st.lists(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=9)))
@settings(max_examples=25, deadline=None)
def test_any_path_survives_the_way_through_the_shell(folder, tmp_path_factory, parts):
    """As a default in settings.sh, and as what `configure` writes into the YAML."""
    path = Path("/m", *parts)
    place = tmp_path_factory.mktemp("any")
    rendered = render_folder(read_recipe(NAME), target=path, draft=path)
    (place / "settings.sh").write_text(rendered.files["settings.sh"])
    done = subprocess.run(
        ["bash", "-c", '. "$0/settings.sh"; printf "%s" "$TARGET"', str(place)], env=environment(), capture_output=True
    )
    assert done.stdout.decode() == str(path) and not done.stderr
    if not str(path).isprintable():
        return  # a YAML of ours escapes it; the shell's copy is not asked to
    configure = f'. "$0/settings.sh"; . {shlex.quote(str(folder))}/common.sh; configure "$1" "$0/out"; clean_up'
    plain = folder / "triton/tensorrt_llm/1/model.yaml"
    subprocess.run(["bash", "-c", configure, str(place), str(plain)], env=environment(), check=True)
    values = yaml.safe_load((place / "out").read_text())
    assert values["model"] == values["speculative_config"]["speculative_model"] == str(path)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", LAUNCHERS.values())
def test_all_that_is_missing_is_told_at_once(folder, script):
    code, said = refused("bash", folder / script, TARGET="/no/target", DRAFT="/no/draft", DOCKER="no-docker")
    assert code == 2
    assert "no such folder — /no/target — set TARGET, or: hf download openai/gpt-oss-120b" in said
    assert "no such folder — /no/draft — set DRAFT, or: hf download z-lab/gpt-oss-120b-DFlash" in said
    program = {"slurm.sbatch": "SLURM_JOB_ID", "docker.sh": "no-docker", "triton.sh": "model.py"}.get(
        script, "trtllm-serve"
    )
    assert program in said


def test_a_folder_that_is_no_checkpoint_is_none(folder, tmp_path):
    code, said = refused("bash", folder / "serve.sh", TARGET=tmp_path, DRAFT=tmp_path)
    assert code == 2 and f"no config.json in it — {tmp_path}" in said and f"no *.safetensors in it — {tmp_path}" in said


def test_a_port_that_is_taken_or_none_is_refused(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = refused("bash", folder / "serve.sh", PORT=port, SERVER_COMMAND="true")
    assert code == 2 and f"something listens there already — 127.0.0.1:{port}" in said
    code, said = refused("bash", folder / "mpirun.sh", PORT="8k", SERVER_COMMAND="true")
    assert code == 2 and "PORT is '8k'" in said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PORT": "08000"}, "PORT is '08000'"),
        ({"GRACE": "1.5"}, "GRACE is '1.5' — environment — give a whole number, 0 or more"),
        ({"GRACE": "08"}, "GRACE is '08'"),
        ({"START_TIMEOUT": "soon"}, "START_TIMEOUT is 'soon'"),
        ({"STOP_SIGNAL": "STOPP"}, "STOP_SIGNAL is 'STOPP' — environment — name a signal"),
        ({"RANKS": "two"}, "RANKS is 'two'"),
        ({"SERVER_COMMAND": "it's"}, "a quote in it is not closed on its line — SERVER_COMMAND"),
        ({"SERVER_COMMAND": "no-such-program --x"}, "no program no-such-program here"),
        ({"TMPDIR": "/no/such/folder"}, "no folder can be made for this run — /no/such/folder — set TMPDIR"),
    ],
)
def test_what_is_set_to_nonsense_is_refused_before_anything_starts(folder, variables, said):
    code, told = refused("bash", folder / "mpirun.sh", **{"SERVER_COMMAND": "true", **variables})
    assert code == 2 and told.count("error: ") == 1 and said in told


def test_containers_and_triton_take_no_other_server(folder):
    for script in ("docker.sh", "triton.sh"):
        code, said = refused("bash", folder / script, SERVER_COMMAND="true")
        assert code == 2 and f"{script} takes no other server — SERVER_COMMAND" in said


def test_links_out_of_a_checkpoint_are_not_mounted(folder, checkpoints, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for file in checkpoints["TARGET"].iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    own = {"TARGET": tmp_path / "snapshot", "DRAFT": checkpoints["DRAFT"], "DOCKER": "true"}
    code, said = refused("bash", folder / "docker.sh", **own)
    assert code == 2 and said.count("error: ") == 1
    assert f"links in it lead out of it, where a container sees nothing — {tmp_path / 'snapshot'}" in said
    (tmp_path / "linked").symlink_to(checkpoints["TARGET"])  # the folder itself may be one
    assert "error" not in refused("bash", folder / "docker.sh", **own | {"TARGET": tmp_path / "linked"})[1]


def test_tritons_other_ports_are_looked_at_too(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = refused("bash", folder / "triton.sh", PORT=port - 2)
    assert code == 2 and f"something listens there already — 127.0.0.1:{port} — " in said
    assert "give a number from 1 to 65533" in refused("bash", folder / "triton.sh", PORT=65534)[1]


def test_mpirun_takes_one_rank_or_all(folder, checkpoints):
    code, said = refused("bash", folder / "mpirun.sh", RANKS=3, **checkpoints)
    assert code == 2 and "RANKS is 3 — environment — set it to 1 or 8" in said


def test_slurms_script_wants_the_jobs_first_node(folder):
    code, said = refused("bash", folder / "slurm.sbatch", SERVER_COMMAND="true", SLURM_JOB_ID=1, SLURM_NODEID=1)
    assert code == 2 and "not the job's first node" in said


def test_a_copy_of_slurms_script_looks_where_it_was_submitted(folder, tmp_path):
    shutil.copy(folder / "slurm.sbatch", tmp_path)
    code, said = refused("bash", tmp_path / "slurm.sbatch", SLURM_SUBMIT_DIR=tmp_path)
    assert code == 2 and "submit slurm.sbatch from the folder that it is in" in said
    code, said = refused("bash", tmp_path / "slurm.sbatch", SLURM_SUBMIT_DIR=folder)
    assert code == 2 and "submit" in said and "settings.sh" not in said


# -- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "ranks", "variables", "number"),
    [("one", 1, {}, signal.SIGTERM), ("two ranks", 2, {"STOP_SIGNAL": "USR1"}, signal.SIGINT)],
)
def test_mpirun_serves_until_it_is_told_to_end(folder, engines, tmp_path, engine, ranks, variables, number):
    server = our_server(engines / engine)
    words = ("bash", folder / "mpirun.sh")
    with Launched(*words, SERVER_COMMAND=server, RANKS=ranks, TMPDIR=tmp_path, **variables) as launched:
        launched.until_ready()
        assert launched.complete()["usage"]["completion_tokens"] == 4
        code, said = launched.end(number)
    assert code == 0 and "asking the server to end" in said
    assert not listens(launched.port) and not list(tmp_path.glob("dflash-trt-run.*"))


@pytest.mark.parametrize("script", ["serve.sh", "mpirun.sh"])
def test_a_closed_terminal_ends_the_server_as_a_signal_would(folder, script, tmp_path):
    """And nobody is there any more to read what is said of it."""
    (tmp_path / "server.py").write_text(STUBBORN)
    server = shlex.join([sys.executable, str(tmp_path / "server.py")])
    with Launched("bash", folder / script, SERVER_COMMAND=server, TMPDIR=tmp_path) as launched:
        launched.until_ready()
        assert launched.process.stderr
        os.close(launched.process.stderr.fileno())
        os.dup2(os.open(os.devnull, os.O_RDONLY), launched.process.stderr.fileno())
        launched.process.send_signal(signal.SIGHUP)
        assert launched.process.wait(20) == 7
    until(lambda: not listens(launched.port))
    assert [path.name for path in tmp_path.iterdir()] == ["server.py"]


def test_ctrl_c_in_a_terminal_gives_the_server_its_grace_while_it_loads(folder, tmp_path):
    """It goes to all that runs in front, the launcher's `sleep` among them."""
    loading = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1); time.sleep(60)"
    server = shlex.join([sys.executable, "-uc", loading])
    own = environment(SERVER_COMMAND=server, PORT=free_port(), TMPDIR=tmp_path)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("bash", ["bash", str(folder / "serve.sh")], own)
    assert os.read(terminal, 1) == b"1"
    time.sleep(0.5)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    said = os.read(terminal, 4096).decode()
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 7 and "asking the server to end" in said
    assert not list(tmp_path.iterdir())


def test_a_signal_before_anything_started_leaves_nothing(folder, tmp_path):
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "xargs").write_text("#!/bin/bash\ntouch $TMPDIR/now; sleep 1\n")  # one of the checks
    (slow / "xargs").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    own = {"PATH": f"{slow}:{os.environ['PATH']}", "TMPDIR": tmp_path / "tmp", "SERVER_COMMAND": "sleep 60"}
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with Launched("bash", folder / "serve.sh", **own) as launched:
            until((tmp_path / "tmp" / "now").exists)
            assert launched.end(number)[0] == code
        (tmp_path / "tmp" / "now").unlink()
        assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("script", ["serve.sh", "mpirun.sh"])
def test_what_the_server_ends_with_is_what_the_launcher_ends_with(folder, script, tmp_path):
    (tmp_path / "server.py").write_text(STUBBORN)
    server = shlex.join([sys.executable, str(tmp_path / "server.py")])
    with Launched("bash", folder / script, SERVER_COMMAND=server) as launched:
        launched.until_ready()
        assert launched.end(signal.SIGTERM)[0] == 7


def test_a_server_that_stays_is_ended_after_its_grace(folder, tmp_path):
    (tmp_path / "server.py").write_text(STUBBORN)
    server = shlex.join([sys.executable, str(tmp_path / "server.py"), "--stay"])
    with Launched("bash", folder / "mpirun.sh", SERVER_COMMAND=server, GRACE=1) as launched:
        launched.until_ready()
        start = time.monotonic()
        code, said = launched.end(signal.SIGTERM)
    assert code != 0 and "it has not ended: asking its launcher" in said and time.monotonic() - start < 20
    until(lambda: not listens(launched.port))


def test_a_server_that_never_answers_is_a_failure(folder):
    with Launched("bash", folder / "serve.sh", SERVER_COMMAND="sleep 60", START_TIMEOUT=1) as launched:
        _, said = launched.process.communicate(timeout=60)
    assert launched.process.returncode != 0 and ("no answer within 1 s" in said or "before it answered" in said)
    code, said = refused("bash", folder / "mpirun.sh", SERVER_COMMAND="true")
    assert code == 1 and "before it answered" in said


def test_trtllm_serve_is_called_with_the_files_and_folders_that_are_meant(folder, checkpoints, tmp_path):
    """A program of that name prints its arguments and the YAML; on both ways to start it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "trtllm-serve").write_text('#!/bin/bash\nprintf "<%s>" "$@"; cat "$3"; env | grep TRTLLM_ENABLE_PDL\n')
    (tools / "trtllm-llmapi-launch").write_text(
        '#!/bin/bash\n[[ $OMPI_COMM_WORLD_RANK == 0 ]] || exit 0\ntask="${*}"\n$task\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    for script, variables in [("serve.sh", {}), ("mpirun.sh", {}), ("mpirun.sh", {"RANKS": 8})]:
        own = {**checkpoints, **variables, "PATH": f"{tools}:{BINARIES}:{os.environ['PATH']}", "PORT": free_port()}
        done = subprocess.run(
            ["bash", str(folder / script)], env=environment(**own), capture_output=True, text=True, timeout=60
        )
        call, _, text = done.stdout.partition("# gpt-oss")
        assert call.startswith(f"<{checkpoints['TARGET']}><--config><") and f"<--port><{own['PORT']}>" in call
        config = yaml.safe_load("# " + text.replace("TRTLLM_ENABLE_PDL=1", ""))
        assert config["speculative_config"]["speculative_model"] == str(checkpoints["DRAFT"])
        assert "TRTLLM_ENABLE_PDL=1" in done.stdout and "before it answered" in done.stderr


def test_docker_gets_limits_mounts_and_variables(folder, checkpoints, tmp_path):
    tool = tmp_path / "docker"
    tool.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    own = environment(**checkpoints, DOCKER=tool, PORT=free_port())
    done = subprocess.run(["bash", str(folder / "docker.sh")], env=own, capture_output=True, text=True, timeout=60)
    words = done.stdout.splitlines()
    assert {"--ipc=host", "memlock=-1", "stack=67108864", "TRTLLM_ENABLE_PDL", "HOST=0.0.0.0"} <= set(words)
    assert f"127.0.0.1:{own['PORT']}:{own['PORT']}" in words
    mounts = [next(csv.reader([word])) for word in words if word.startswith("type=bind")]  # as docker takes them apart
    for path in (folder, *checkpoints.values()):
        assert ["type=bind", f"source={path}", f"target={path}", "readonly"] in mounts
    assert words[-3:] == ["nvidia/tensorrt-llm/release:1.4.0rc1", "bash", f"{folder}/server.sh"]


def test_a_container_is_removed_where_it_does_not_end(folder, checkpoints, tmp_path):
    """Its client can be killed, and that would leave it."""
    tool, log = tmp_path / "docker", tmp_path / "log"
    tool.write_text(f"""#!/bin/bash
echo "$1 $2" >>{log}
if [[ $1 == run ]]; then trap '' TERM; while :; do sleep 0.1; done; fi
""")
    tool.chmod(0o755)
    with Launched("bash", folder / "docker.sh", DOCKER=tool, GRACE=0, **checkpoints) as launched:
        until(lambda: log.exists() and "run" in log.read_text())
        assert launched.end(signal.SIGTERM)[0] == 137
    assert "stop --time" in log.read_text() and "rm --force" in log.read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.mark.parametrize(("engine", "ranks", "stop"), [("one", 1, "TERM"), ("two ranks", 2, "USR1")])
def test_slurm_serves_until_it_is_told_to_end(cluster, folder, engines, tmp_path, engine, ranks, stop):
    port, log = free_port(), tmp_path / "log"
    own = {"SERVER_COMMAND": our_server(engines / engine), "RANKS": ranks, "STOP_SIGNAL": stop, "PORT": port}
    variables = environment(**own) | {"SLURM_CONF": cluster.environment["SLURM_CONF"]}
    words = ["sbatch", "--parsable", f"--output={log}", str(folder / "slurm.sbatch")]
    done = subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    until(lambda: log.exists() and "ready after" in log.read_text(), 60)
    with Launched("sleep", "0", PORT=port) as caller:
        assert caller.complete()["usage"]["completion_tokens"] == 4
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    ended: Callable[[], bool] = lambda: "COMPLETED" in cluster.run("scontrol", "show", "job", job)  # noqa: E731
    until(ended, 60)
    assert "asking the server to end" in log.read_text() and not listens(port)
