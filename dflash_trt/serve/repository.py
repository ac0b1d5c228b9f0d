"""A Triton model repository of an engine directory: what `deploy triton` writes.

    REPO/start.py                      starts tritonserver on it; Triton itself looks at folders alone
    REPO/NAME/config.pbtxt             tensors, and how to run the engine
    REPO/NAME/1/model.py               speaks to `dflash-trt serve`
    REPO/NAME/1/dflash_triton/         what model.py is made of

The engine stays where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import dflash_trt
from dflash_trt.durable import reported
from dflash_trt.engine.directory import staged
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import UserError
from dflash_trt.serve.address import check_path
from dflash_trt.serve.identity import identity
from dflash_trt.serve.paths import check_reachable, printable

VERSION = "1"  # of the model, to Triton
START = "start.py"
CONFIG = "config.pbtxt"
MODEL = "model.py"
PACKAGE = "dflash_triton"
LONGEST_NAME = 200  # bytes, of model and folder: file systems hold 255, and staging adds to it
UNSAFE = re.compile(r"[^\w@%+=:,./-]", re.ASCII)  # Triton's Python backend hands paths to a shell as they are
OWN = ("--socket", "--no-http", "--host", "--port", "--parent", "--json", "--max-waiting", "--grace")  # the model's


@dataclass(frozen=True)
class Repository:
    """A model repository with one model."""

    path: Path
    name: str
    engine: Path
    ranks: int

    @property
    def start(self) -> Path:
        return self.path / START


def write_repository(
    engine: Path,
    output: Path,
    *,
    name: str,
    socket: Path | None = None,
    max_waiting: int = 256,
    grace: float = 30,
    arguments: Sequence[str] = (),
    force: bool = False,
) -> Repository:
    """Write the model repository `output` for the engine directory `engine`.

    With `socket` the model attaches to a server that somebody runs there; without, it starts one, with `arguments` for
    `dflash-trt serve`. `force` replaces a repository that this wrote. Raises UserError for what cannot be served.
    """
    if name == START or not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise UserError(f"{name[:80]!r} is no name of a model", where="--name", fix="use letters, digits, _, - and .")
    if len(name) > LONGEST_NAME:
        raise UserError(f"the name has {len(name)} characters", where="--name", fix=f"use {LONGEST_NAME} at most")
    _check_output(output)
    if socket:
        check_path(socket.absolute())
    if socket and arguments:
        fix = "give the options to the server there"
        raise UserError("options are for a server that the model starts", where="--socket", fix=fix)
    if taken := [word for word in arguments if word.partition("=")[0] in OWN]:
        fix = "leave it out; --socket, --max-waiting and --grace go before the --"
        raise UserError(f"{taken[0]} is the model's to choose", where="options behind --", fix=fix)
    check_reachable(engine, "engine directory")
    manifest = read_manifest(engine)
    parameters = {
        "engine_directory": str(engine.resolve()),
        "ranks": str(manifest.mapping.world),
        "command": _command(),
        "arguments": shlex.join(arguments),
        "socket": str(socket.absolute()) if socket else "",
        "grace": str(float(grace)),
        "max_waiting": str(max_waiting),
        "identity": identity(manifest),
    }
    for key, value in parameters.items():
        if not value.isprintable():  # nor UTF-8, then
            what = "Triton's configuration takes printable UTF-8 alone"
            raise UserError(what, where=f"{key.replace('_', ' ')}: {printable(value)}", fix="use another name")
    templates = _templates()
    with _replaced(output, force), staged(output) as folder:
        shutil.copyfile(templates / START, folder / START)
        version = folder / name / VERSION
        version.mkdir(parents=True)
        config = string.Template((templates / CONFIG).read_text(encoding="utf-8"))
        text = config.substitute(name=_quoted(name), parameters=_as_pbtxt(parameters))
        (folder / name / CONFIG).write_text(text, encoding="utf-8")
        shutil.copyfile(templates / MODEL, version / MODEL)
        shutil.copytree(templates / PACKAGE, version / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return Repository(output.absolute(), name, engine.resolve(), manifest.mapping.world)


def _check_output(output: Path) -> None:
    """Raise UserError for a path that Triton cannot start from, or that the file system does not hold."""
    check_reachable(output, "--output")
    place = output.resolve()
    if len(os.fsencode(place.name)) > LONGEST_NAME:
        what = f"the name of the folder has more than {LONGEST_NAME} bytes"
        raise UserError(what, where=printable(place), fix="give --output a shorter one")
    if found := UNSAFE.search(str(place)):
        what = f"Triton's Python backend takes no path with {found[0]!a}"
        fix = "give --output a path of letters, digits and @%+=:,./-_ alone"
        raise UserError(what, where=printable(place), fix=fix)


def _templates() -> Path:
    """In the package where it is installed, beside it in a clone."""
    package = Path(dflash_trt.__file__).parent
    return next(path / "deploy" / "triton" for path in (package, package.parent) if (path / "deploy").is_dir())


def _command() -> str:
    """The command that this is a run of."""
    beside = Path(sys.executable).with_name("dflash-trt")
    return str(beside) if beside.is_file() else shutil.which("dflash-trt") or "dflash-trt"


def _as_pbtxt(parameters: dict[str, str]) -> str:
    return "\n".join(
        f"parameters {{ key: {_quoted(key)}, value: {{ string_value: {_quoted(value)} }} }}"
        for key, value in parameters.items()
    )


def _quoted(text: str) -> str:
    """As a string of protobuf's text format, which knows the escapes of JSON that can occur."""
    return json.dumps(text, ensure_ascii=False)


def _strangers(repository: Path) -> list[Path]:
    """Files and folders in a model repository that no `write_repository` made."""
    found = []
    for entry in sorted(repository.iterdir()):
        if entry.name == START and entry.is_file():
            continue
        version = entry / VERSION
        if entry.is_symlink() or not (version / PACKAGE).is_dir():
            found.append(entry)
            continue
        found += [inner for inner in sorted(entry.iterdir()) if inner.name not in (CONFIG, VERSION)]
        found += [inner for inner in sorted(version.iterdir()) if inner.name not in (MODEL, PACKAGE, "__pycache__")]
    return found


@contextlib.contextmanager
def _replaced(output: Path, force: bool) -> Iterator[None]:
    """Put an older repository aside, and back if the new one does not come to be."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        yield
        return
    if output.is_symlink() or not (output / START).is_file() or not list(output.glob(f"*/{VERSION}/{PACKAGE}")):
        raise UserError("exists and is not a model repository of ours", where=output, fix="choose another --output")
    if not force:
        raise UserError("model repository exists", where=output, fix="pass --force to replace it")
    if strangers := _strangers(output):
        what = "the repository holds what `deploy` did not write, and replacing it would delete that"
        raise UserError(what, where=strangers[0], fix="move it elsewhere, or choose another --output")
    former = output.absolute().with_name(f".{output.name}.replaced-{secrets.token_hex(4)}")
    with reported(output):
        output.rename(former)
    try:
        yield
    except BaseException:
        former.rename(output)
        raise
    shutil.rmtree(former, ignore_errors=True)
