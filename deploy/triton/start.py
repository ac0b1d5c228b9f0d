"""Start Triton Inference Server on the model repository this file lies in.

    python start.py --http-port 8000 --grpc-port 8001 --metrics-port 8002

The server is the one in PATH, that of NVIDIA's container, or that of the wheel `nvidia-pytriton` of the interpreter
that runs this. SIGTERM and Ctrl-C let running requests end. Words after `--` go to tritonserver as they are; its
--model-repository=OTHER serves further ones.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
LIBRARY_PATH = "DFLASH_TRT_LD_LIBRARY_PATH"  # the engine gets its LD_LIBRARY_PATH back from here
FOLDER = "DFLASH_TRT_FOLDER"  # the models' sockets go there
STOPPING = "stopping"  # a file there, from the moment the server is told to end
INSTALL = "pip install nvidia-pytriton 'numpy<2'"
PR_SET_PDEATHSIG = 1
UNSAFE = re.compile(r"[^\w@%+=:,./-]", re.ASCII)  # Triton's Python backend hands paths to a shell as they are
GRACE = re.compile(r'key:\s*"grace"\s*,?\s*value:?\s*\{\s*string_value:\s*"([^"]*)"')


def main() -> int:
    arguments = parse(sys.argv[1:])
    for repository in repositories(arguments.further):
        if configs(repository):
            check_path(repository, "move the model repository to another path")
    with tempfile.TemporaryDirectory(prefix="dflash-triton-") as folder:
        check_path(folder, "set TMPDIR to another folder")
        server, environment = find_server(Path(folder))
        return run([*server, *options(arguments), *arguments.further], environment | {FOLDER: folder})


def parse(words: list[str]) -> argparse.Namespace:
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, port in {"http": 8000, "grpc": 8001, "metrics": 8002}.items():
        parser.add_argument(f"--{name}-port", type=int, default=port, help="(default: %(default)s)")
    parser.add_argument("--address", default="127.0.0.1", help="of all three (default: %(default)s)")
    stop = longest_grace(repositories(words[end + 1 :])) + 15
    parser.add_argument("--exit-timeout", type=int, default=stop, help="seconds a stop may take (default: %(default)s)")
    found = parser.parse_args(words[:end])
    found.further = words[end + 1 :]
    return found


def repositories(further: list[str]) -> list[Path]:
    """This one, and those that the words for tritonserver name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-repository", "--model-store", action="append", default=[])
    return [HERE, *map(Path, parser.parse_known_args(further)[0].model_repository)]


def configs(repository: Path) -> dict[Path, str]:
    """Those of models that `dflash-trt deploy` made."""
    found = {path: path.read_text(encoding="utf-8", errors="replace") for path in repository.glob("*/config.pbtxt")}
    return {path: text for path, text in found.items() if GRACE.search(text)}


def longest_grace(repositories: list[Path]) -> int:
    """Seconds for which a model of ours lets running requests go on."""
    found = []
    for path, text in (item for repository in repositories for item in configs(repository).items()):
        said = GRACE.findall(text)[0]
        try:
            found.append(math.ceil(float(said)))
        except (ValueError, OverflowError):
            refuse(f"the grace is {said!r}, no number of seconds", path, "write one, such as 30.0")
    return max(found, default=30)


def check_path(path: object, fix: str) -> None:
    if found := UNSAFE.search(str(path)):
        what = f"Triton's Python backend takes no path with {found[0]!a}"
        refuse(what, path, f"{fix}, of letters, digits and @%+=:,./-_ alone")


def refuse(what: str, where: object, fix: str) -> NoReturn:
    """One line, and the exit code of mistakes that stay when it is tried again."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(where))
    print(f"error: {what} — {shown} — {fix}", file=sys.stderr)
    sys.exit(2)


def options(arguments: argparse.Namespace) -> list[str]:
    ports = [f"--{name}-port={getattr(arguments, f'{name}_port')}" for name in ("http", "grpc", "metrics")]
    addresses = [f"--{name}-address={arguments.address}" for name in ("http", "grpc", "metrics")]
    return [f"--model-repository={HERE}", *ports, *addresses, f"--exit-timeout-secs={arguments.exit_timeout}"]


def find_server(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command and its environment; `folder` takes what has to be put together for it."""
    installed = shutil.which("tritonserver") or (str(CONTAINER) if CONTAINER.is_file() else None)
    if installed:
        return [installed], dict(os.environ)
    wheel = importlib.util.find_spec("pytriton")
    if wheel is None or not wheel.submodule_search_locations:
        sys.exit(
            "error: there is no tritonserver — PATH, /opt/tritonserver, the wheel nvidia-pytriton of "
            f"{sys.executable} — run this in NVIDIA's tritonserver container, or: {INSTALL}"
        )
    return from_wheel(Path(wheel.submodule_search_locations[0]), folder)


def from_wheel(package: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The wheel has the Python backend and its stub, one for each version of Python, in different places."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = package / "tritonserver" / "backends" / "python"
    stub = package / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        sys.exit(f"error: the wheel nvidia-pytriton does not support Python {version} — {package} — use another Python")
    if not importlib.util.find_spec("numpy") or not metadata.version("numpy").startswith("1."):
        sys.exit(f"error: the wheel's tritonserver garbles text unless numpy is 1.x — {sys.executable} — {INSTALL}")
    together = folder / "backends" / "python"
    together.mkdir(parents=True)
    for file in (*backend.glob("libtriton_python.so"), *backend.glob("*.py"), stub):
        (together / file.name).symlink_to(file)
    before = os.environ.get("LD_LIBRARY_PATH", "")
    libraries = [sysconfig.get_config_var("LIBDIR"), str(package.with_name("nvidia_pytriton.libs")), before]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        LIBRARY_PATH: before,
        # the stub finds its interpreter, and so numpy, by PATH
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    }
    server = package / "tritonserver" / "bin" / "tritonserver"
    return [str(server), f"--backend-directory={folder / 'backends'}"], environment


def run(command: list[str], environment: dict[str, str]) -> int:
    """Until the server ends; its exit code, or 128 + the signal that killed it."""
    # A session of its own: Ctrl-C at a terminal reaches the server once, from here, not twice.
    server = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_me)

    def stop(*_: object) -> None:
        # Triton tells its models of the end only when no request runs any more; the grace begins now.
        Path(environment[FOLDER], STOPPING).touch()
        server.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    code = server.wait()
    with contextlib.suppress(ProcessLookupError):
        # A model's process may hang in a message to a server that crashed, and keep its engine alive.
        os.killpg(server.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _end_with_me() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
