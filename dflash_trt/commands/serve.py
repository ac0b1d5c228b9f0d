"""`dflash-trt serve`: an engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import typer

from dflash_trt.errors import UserError
from dflash_trt.launcher import find_place
from dflash_trt.runtime.lockstep import follow, lead
from dflash_trt.runtime.open import make_generator, open_engine_on, open_session
from dflash_trt.runtime.world import find_world
from dflash_trt.serve.address import bind
from dflash_trt.serve.identity import HEADER, identity
from dflash_trt.serve.keys import Keys
from dflash_trt.serve.loop import EngineLoop
from dflash_trt.serve.openai.app import make_app
from dflash_trt.serve.openai.front import Settings
from dflash_trt.serve.paths import MOST_WAITING, check_grace, check_reachable
from dflash_trt.serve.server import find_parent
from dflash_trt.serve.server import serve as run


def serve(
    directory: Path = typer.Argument(help="An engine directory."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 for every one of this machine."),
    port: int = typer.Option(8000, min=0, max=65535, help="0: any free one."),
    unix: Path = typer.Option(None, "--socket", help="Also listen on a Unix socket, for this user alone; no API key."),
    no_http: bool = typer.Option(False, "--no-http", help="Only on the Unix socket."),
    model_name: str = typer.Option(None, help="What clients call the model. Default: the target's name."),
    no_draft: bool = typer.Option(False, "--no-draft", help="One token a step, from the target alone."),
    batch: int = typer.Option(None, min=1, help="Requests answered at once. Default: all slots of the engine."),
    threads: int = typer.Option(
        None, min=1, max=4096, help="Of one operator, on a CPU. Default: all cores, shared by ranks."
    ),
    max_waiting: int = typer.Option(256, min=0, max=MOST_WAITING, help="Requests that may wait for a slot."),
    grace: float = typer.Option(30.0, min=0, help="Seconds that running requests have to finish after a signal."),
    api_keys: Path = typer.Option(None, help="A file of API keys, one a line. Or DFLASH_TRT_API_KEYS=KEY,KEY."),
    max_body_bytes: int = typer.Option(1 << 20, min=1, help="Of a request."),
    max_prompt_tokens: int = typer.Option(None, min=1, help="Default: what the engine holds."),
    max_n: int = typer.Option(8, min=1, help="Answers to one request."),
    max_concurrent_per_key: int = typer.Option(None, min=1, help="Requests of one API key at once. Default: any."),
    log_requests: bool = typer.Option(False, "--log-requests", help="Log prompts and answers, too."),
    parent: int = typer.Option(None, help="End when the process with this pid ends."),
    as_json: bool = typer.Option(False, "--json", help="Say where it serves as one JSON object."),
) -> None:
    """Serve an engine over HTTP, as OpenAI's API: chat, completions, models; health and metrics beside them.

    It drains on SIGTERM, SIGINT or SIGUSR1. An engine of several ranks is started with mpirun; that drains on SIGUSR1.
    """
    check_grace(grace)
    check_reachable(directory, "engine directory")
    if not host:
        raise UserError(
            "the host is empty", where="--host", fix="give an address; 0.0.0.0 is every one of this machine"
        )
    if model_name and not model_name.isprintable():
        raise UserError("the name has characters that no line can show", where="--model-name", fix="give plain text")
    _take_signals()
    _raise_file_limit()
    with ExitStack() as stack:
        world = stack.enter_context(find_world())
        engine = open_engine_on(world, directory, "serve", no_draft=no_draft, batch=batch)
        keys, sockets, served = world.together(
            "opening the server",
            lambda: (
                None if world.rank else Keys.read(api_keys) if api_keys else Keys.from_environment(),
                [] if world.rank else bind(None if no_http else host, port, unix),
                find_parent(parent) if parent else None,
            ),
        )
        draft = engine.manifest.draft is not None and not no_draft
        session = open_session(engine, draft=draft, threads=threads, max_batch=batch, world=world)
        if world.rank:
            signal.signal(signal.SIGTERM, _end_late)
            follow(session, world)
            return
        generator = make_generator(engine, stack.enter_context(lead(session, world)), draft=draft)
        # What fails on one of several ranks cannot be tried again: the others stand in its midst.
        loop = EngineLoop(generator, max_waiting=max_waiting, patience=1 if world.size == 1 else 0)
        settings = Settings(
            model=model_name or engine.manifest.target.name,
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=max_prompt_tokens,
            max_n=max_n,
            max_concurrent_per_key=max_concurrent_per_key,
            log_requests=log_requests,
        )
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("dflash_trt").setLevel(logging.INFO)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # a line for each write to a client that has left
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it says the answers say
        app = make_app(loop, generator.tokenizer, settings, keys)
        if not (no_http or keys or _is_local(host)):
            typer.echo(
                f"warning: anyone who reaches {host} may use this server — --api-keys FILE asks for a key", err=True
            )
        where = _addresses(sockets)
        run(
            app,
            loop,
            sockets,
            grace=grace,
            ready=lambda: _announce(settings.model, where, as_json),
            world=world,
            parent=served,
            headers={HEADER: identity(engine.manifest)},
        )


def _is_local(host: str) -> bool:
    """Only this machine's own processes reach such an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(sockets: list[socket.socket]) -> dict[str, str]:
    """Where clients find the server, by kind."""
    where = {}
    for bound in sockets:
        name = bound.getsockname()
        if isinstance(name, str):
            where["socket"] = name
        else:
            host = f"[{name[0]}]" if bound.family == socket.AF_INET6 else name[0]
            where["url"] = f"http://{host}:{name[1]}"
    return where


def _announce(model: str, where: dict[str, str], as_json: bool) -> None:
    record = {"model": model, **where, "pid": os.getpid()}
    text = json.dumps(record) if as_json else f"serving {model} on {' and '.join(where.values())}"
    with contextlib.suppress(OSError):  # nobody need listen to this
        print(text.encode(errors="backslashreplace").decode(), flush=True)  # a path may be no UTF-8


def _take_signals() -> None:
    """Until `server.serve` takes them over. With nothing to finish a drain is the end."""
    place = find_place()
    if place.size == 1:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: sys.exit(0))
    elif place.rank:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # rank 0 drains, and lets the others go
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # it comes when the others can be let go


def _end_late(number: int, _: object) -> None:
    """Give rank 0 the time to see that it is told to end, and not that it has lost a rank."""
    time.sleep(0.1)
    os._exit(128 + number)


def _raise_file_limit() -> None:
    """A connection is an open file, and many systems begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
