"""Tiny engines that answer quickly, and a server for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.engine import convert, open_engine
from dflash_trt.runtime import Generator
from dflash_trt.runtime.open import open_generator
from tests.serve.live import Server
from tests.tiny import make_pair

# As that of the tiny pairs, but for two words.
TEMPLATE = """{% for message in messages %}
{%- if message.content == "refuse" %}{{ raise_exception("no") }}{% endif %}
{%- if message.content == "fail" %}{{ 1 // 0 }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Answers consist of a and b, with drafts accepted in between."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"), words=2, seed=6)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target, draft


@pytest.fixture(scope="session")
def engine(pair, tmp_path_factory) -> Path:
    """Four slots of 2,048 tokens."""
    return convert(*pair, tmp_path_factory.mktemp("serve") / "engine", max_batch=4, max_seq_len=2048).path


@pytest.fixture(scope="session")
def parallel(pair, tmp_path_factory) -> Path:
    """The same for two ranks; a shell would make something else of its path, and it is not ASCII."""
    directory = tmp_path_factory.mktemp("serve") / "two 'ranks' \"é\" $HOME"
    return convert(*pair, directory, max_batch=4, max_seq_len=2048, tp=2).path


@pytest.fixture(scope="session")
def server(engine, tmp_path_factory) -> Iterator[Server]:
    """One for many tests, of which each leaves it without requests. Its log and its counts are those of all of them."""
    with Server(engine, "--threads", 1, "--socket", tmp_path_factory.mktemp("server") / "s") as server:
        yield server


@pytest.fixture(scope="session")
def generator(engine) -> Generator:
    """What answers without a server."""
    return open_generator(open_engine(engine), threads=1)
