"""What can be told about the files in deploy/ without systemd, Slurm, containers or a GPU."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from deploy.triton.start import parse
from dflash_trt.commands.serve import serve
from dflash_trt.runtime import Generator, Limits, Request
from dflash_trt.serve.loop import EngineLoop, QueueFull
from dflash_trt.serve.openai.errors import as_problem
from tests.runtime.toy import VOCAB, ToySession
from tests.waiting import until

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SBATCH = DEPLOY / "slurm" / "serve.sbatch"
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
PROMETHEUS = DEPLOY / "compose" / "prometheus"
GRAFANA = DEPLOY / "compose" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "dflash-trt.json").read_text())
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]


def read_unit(path: Path) -> dict[str, list[str]]:
    """The settings of all sections, each with its values in order."""
    settings: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def read_environment(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def options_of_serve() -> dict[str, Any]:
    """The default of each option that `dflash-trt serve --help` shows, by its name."""
    single = typer.Typer()
    single.command("serve")(serve)
    return {name: option.default for option in typer.main.get_command(single).params for name in option.opts}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# -- commands ----------------------------------------------------------------------------------------------------


def commands() -> dict[str, str]:
    """Everything in deploy/ that starts a server, and what is said of that, as text."""
    found = {unit.name: read_unit(unit)["ExecStart"][0] for unit in UNITS}
    found["serve.env"] = read_environment(DEPLOY / "systemd" / "serve.env")["OPTIONS"]
    found["serve.sbatch"] = "\n".join(
        line for line in SBATCH.read_text().splitlines() if not line.startswith("#") and "command" in line
    )
    found["compose.yaml"] = " ".join(COMPOSE["services"]["server"]["command"])
    found["Containerfile"] = re.findall(r"^CMD (.*)", CONTAINERFILE.read_text(), re.MULTILINE)[-1]
    found["serving.md"] = (ROOT / "docs" / "serving.md").read_text().partition("## How fast")[0]
    return found


@pytest.mark.parametrize("name", commands())
def test_every_option_is_one_of_serve(name):
    used = re.findall(r"--[a-z][a-z-]*", commands()[name])
    assert used and set(used) <= set(options_of_serve())


def test_all_name_one_port():
    port = str(options_of_serve()["--port"])
    text = CONTAINERFILE.read_text()
    assert read_environment(DEPLOY / "systemd" / "serve.env")["PORT"] == port
    assert f"PORT=${{PORT:-{port}}}" in SBATCH.read_text()
    assert re.findall(r"^EXPOSE (.*)", text, re.MULTILINE) == [port]
    assert re.findall(r'"--port", "(\d+)"', text) == [port]
    assert set(re.findall(r"127\.0\.0\.1:(\d+)/", text)) == {port}
    server = COMPOSE["services"]["server"]
    assert server["command"][server["command"].index("--port") + 1] == port
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    [scraped] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"server:{port}"]}]


def test_others_reach_a_server_only_with_keys():
    assert read_environment(DEPLOY / "systemd" / "serve.env")["HOST"] == options_of_serve()["--host"] == "127.0.0.1"
    assert all("/etc/dflash-trt/keys.env" in read_unit(unit)["EnvironmentFile"] for unit in UNITS)
    assert COMPOSE["services"]["server"]["environment"]["DFLASH_TRT_API_KEYS"].startswith("${DFLASH_TRT_API_KEYS:?")
    assert all(port.startswith("127.0.0.1:") for one in COMPOSE["services"].values() for port in one["ports"])


# -- systemd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_unit(unit, tmp_path):
    configparser.ConfigParser(strict=False, interpolation=None).read_string(unit.read_text())
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("no systemd-analyze here: only the syntax was checked")
    # it wants the programs to be there
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"/opt/dflash-trt/bin/[a-z-]+", "/bin/true", unit.read_text()))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_drains_restarts_and_is_confined(unit):
    settings, environment = read_unit(unit), read_environment(DEPLOY / "systemd" / "serve.env")
    several = "mpirun" in settings["ExecStart"][0]
    assert settings["KillSignal"] == ["SIGUSR1" if several else "SIGTERM"] and settings["KillMode"] == ["mixed"]
    assert seconds(settings["TimeoutStopSec"][0]) >= float(environment["GRACE"]) + 5
    assert settings["Restart"] == ["on-failure"] and settings["RestartPreventExitStatus"] == ["2"]
    assert "Conflicts" not in settings, "both are installed under one name"
    assert settings["User"] == ["dflash"] and settings["NoNewPrivileges"] == ["yes"]
    assert not {"PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"} & set(settings), "CUDA would not run"
    assert set(re.findall(r"\$\{?([A-Z]+)", settings["ExecStart"][0])) <= set(environment)


# -- Slurm -------------------------------------------------------------------------------------------------------


def test_the_slurm_script_is_bash_and_drains_before_the_time_is_up():
    done = subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    [left] = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", SBATCH.read_text(), re.MULTILINE)
    [grace] = re.findall(r"GRACE:-(\d+)", SBATCH.read_text())
    assert int(grace) + 5 <= int(left)


LAUNCHER = """\
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print(*sys.argv[1:], flush=True)
for number in range(int(os.environ["SIGNALS"])):
    signal.sigwait({signal.SIGUSR1})
    print("draining", number, flush=True)
sys.exit(int(sys.argv[2]))  # stands where -n RANKS is
"""


@pytest.fixture
def slurm(tmp_path):
    """Starts the script; mpirun and srun are programs that end as RANKS says, after so many SIGUSR1 as SIGNALS says."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    for name in ("mpirun", "srun"):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "launcher.py"} "$@"\n')
        (tmp_path / name).chmod(0o755)

    def start(**variables: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment = clean | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ENGINE": "E N"} | variables
        return subprocess.Popen(
            ["bash", str(SBATCH)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.mark.parametrize(("code", "signals"), [(0, 1), (0, 2), (7, 1), (7, 2)])
def test_the_slurm_script_hands_signals_on_and_ends_as_the_ranks_did(slurm, code, signals):
    with slurm(SLURM_NTASKS=str(code), OPTIONS="--max-waiting 9", SIGNALS=str(signals)) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith(f"-n {code} dflash-trt serve E N --host 127.0.0.1 --port 8000")
        for number in range(signals):
            job.send_signal(signal.SIGUSR1)
            assert job.stdout.readline() == f"draining {number}\n"
        assert job.wait(20) == code


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_NTASKS": "8", "HOST": "0.0.0.0"}, "DFLASH_TRT_KEYS"),
        ({"SLURM_NTASKS": "8", "LAUNCH": "ssh"}, "mpirun or srun"),
        ({}, "SLURM_NTASKS"),
        ({"SLURM_NTASKS": "8", "ENGINE": ""}, "engine directory"),
    ],
)
def test_the_slurm_script_refuses_what_cannot_work(slurm, variables, said):
    with slurm(**variables) as job:
        assert said in job.communicate(timeout=20)[1] and job.returncode in (1, 2)


# -- containers --------------------------------------------------------------------------------------------------


def test_the_image_is_pinned_unprivileged_and_looks_after_itself():
    text = CONTAINERFILE.read_text()
    assert re.search(r"^ARG PYTHON=python:3\.12\.\d+-slim-\w+$", text, re.MULTILINE)
    final = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE) and "/health" in final
    assert final.index("\nUSER ") < final.index("\nENTRYPOINT ")
    assert seconds(COMPOSE["services"]["server"]["stop_grace_period"]) >= 35
    assert all(
        re.search(r":v?\d+\.\d+\.\d+$", COMPOSE["services"][name]["image"]) for name in ("prometheus", "grafana")
    )


@pytest.mark.parametrize("file", sorted((DEPLOY / "container").glob("Containerfile*[!e]")), ids=lambda file: file.name)
def test_what_the_image_copies_is_there_and_sent_to_the_builder(file):
    ignored = (DEPLOY / "container" / "Containerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.*)", file.read_text(), re.MULTILINE)
    sources = [word for line in copied for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored


def test_the_image_for_gpus_starts_triton_so_that_running_requests_have_their_grace():
    text = CONTAINERFILE.with_name("Containerfile.triton").read_text()
    python, script, *words = json.loads(re.findall(r"^CMD (.*)", text, re.MULTILINE)[-1])
    assert (python, Path(script).name, words) == ("python3", "start.py", ["--address", "0.0.0.0"])
    parse(words)
    assert int(re.findall(r"--stop-timeout (\d+)", text)[0]) > options_of_serve()["--grace"] + 15
    assert "ENV PATH=$PATH:" in text, "python3 stays Triton's own"


def test_a_container_with_a_mistake_is_not_started_for_ever():
    assert re.fullmatch(r"on-failure:\d", COMPOSE["services"]["server"]["restart"])


def test_where_the_container_has_the_engines_is_for_the_user_to_say():
    server = COMPOSE["services"]["server"]
    [mount] = server["volumes"]
    [place] = re.findall(r"\}:(\$\{MOUNT:-/srv/dflash-trt\}):ro$", mount)
    assert server["command"][1] == f"{place}/engine"


def test_compose_mounts_what_is_there():
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).is_dir()
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]
    build = COMPOSE["services"]["server"]["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).resolve() == CONTAINERFILE


# -- Prometheus and Grafana --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The name of every series that a server with a drafter shows once it has answered a request."""
    limits = Limits(max_batch=2, max_seq_len=64, block_size=4, max_query=8)
    loop, done = EngineLoop(Generator(ToySession(limits), vocab=VOCAB)), threading.Event()
    loop.start()
    until(lambda: loop.state == "ready")
    loop.submit(Request([1, 2, 3], 20), lambda out: done.set() if out.finished else None)
    assert done.wait(20) and loop.close(20)
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", loop.metrics.text().decode(), re.MULTILINE):
        names |= {name + end for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}
    return {name for name in names if not name.endswith("_created")}


def queries() -> dict[str, str]:
    found = {rule["alert"]: rule["expr"] for rule in ALERTS}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            found[f"{panel['title']}: {target['legendFormat']}"] = target["expr"]
    found["variable"] = DASHBOARD["templating"]["list"][0]["definition"]
    return found


@pytest.mark.parametrize("name", queries())
def test_queries_ask_for_metrics_that_exist(metrics, name):
    asked = set(re.findall(r"\bdflash_\w+", queries()[name]))
    assert asked <= metrics and (asked or name == "DflashDown")


def test_the_alert_for_a_full_queue_names_the_reason_that_is_counted():
    [alert] = [rule["expr"] for rule in ALERTS if rule["alert"] == "DflashRefusing"]
    assert re.findall('reason="(.*?)"', alert) == [as_problem(QueueFull("")).code]


def test_the_dashboard_shows_every_metric(metrics):
    """Of a histogram any of its series; what counts calls of the engine stands in the number of steps.

    The start of the process is for whoever must tell a restart.
    """
    shown = set(re.findall(r"\bdflash_\w+", json.dumps(DASHBOARD)))
    ends = re.compile("_(bucket|sum|count)$")
    left_out = {"dflash_steps_total", "dflash_start_time_seconds"}
    assert {ends.sub("", name) for name in metrics} - {ends.sub("", name) for name in shown} <= left_out


def test_grafana_finds_its_source_and_its_dashboard():
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/dflash-trt.yaml").read_text())["providers"]
    assert set(re.findall(r'"uid": "(\w+)"', json.dumps(DASHBOARD))) - {"dflash"} == {source["uid"]}
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in COMPOSE["services"]["grafana"]["volumes"]
    [port] = COMPOSE["services"]["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rsplit(':', 1)[1]}"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_prometheus_takes_its_configuration_and_alerts_fire_as_they_should():
    assert {"DflashDown", "DflashQueueGrowing", "DflashTauFalling", "DflashSlowFirstToken"} <= {
        rule["alert"] for rule in ALERTS
    }
    assert yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
    if not (promtool := shutil.which("promtool")):
        pytest.skip("no promtool here: only the names were checked")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
