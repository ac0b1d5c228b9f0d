"""Tiny engine directories: converted once a session, copied for tests that damage them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_trt.engine import convert
from tests.tiny import make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def converted(pair, tmp_path_factory) -> Path:
    """Not to be changed."""
    return convert(*pair, tmp_path_factory.mktemp("engines") / "engine", max_batch=2, max_seq_len=64, max_query=16).path


@pytest.fixture
def engine(converted, tmp_path) -> Path:
    """A copy that the test may change; its links still lead to the pair."""
    return Path(shutil.copytree(converted, tmp_path / "engine", symlinks=True))
