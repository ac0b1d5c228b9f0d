"""Fingerprints notice changes and cost milliseconds whatever the size."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.engine.fingerprint import BLOCK, SAMPLES, fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fingerprints")


@given(size=st.integers(1, 5 * BLOCK), where=st.integers(0), flip=st.integers(1, 255))
def test_any_changed_byte_of_a_small_file_is_noticed(folder, size, where, flip):
    content = bytearray(i % 251 for i in range(size))
    (folder / "file").write_bytes(content)
    before = fingerprint(folder / "file")
    content[where % size] ^= flip
    (folder / "file").write_bytes(content)
    assert fingerprint(folder / "file") != before


@given(size=st.integers(0, 3 * BLOCK), more=st.integers(1, BLOCK))
def test_a_longer_file_of_the_same_zeros_is_noticed(folder, size, more):
    (folder / "short").write_bytes(bytes(size))
    (folder / "long").write_bytes(bytes(size + more))
    assert fingerprint(folder / "short") != fingerprint(folder / "long")


def test_a_sparse_16_gb_checkpoint_takes_less_than_a_second_and_its_header_and_end_count(folder):
    file = folder / "model.safetensors"
    header = b"{" + b" " * 3 * BLOCK + b"}"
    with file.open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(16 * 2**30)
    started = time.perf_counter()
    before = fingerprint(file)
    assert time.perf_counter() - started < 1
    with file.open("r+b") as f:
        f.seek(2 * BLOCK)
        f.write(b"x")
    inside_header = fingerprint(file)
    with file.open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"x")
    assert len({before, inside_header, fingerprint(file)}) == 3


def test_files_of_four_mebibytes_are_covered_in_full(folder):
    file = folder / "file"
    file.write_bytes(bytes(SAMPLES * BLOCK))
    before = fingerprint(file)
    for block in (0, 1, SAMPLES // 2, SAMPLES - 2, SAMPLES - 1):
        with file.open("r+b") as f:
            f.seek(block * BLOCK + 7)
            f.write(b"x")
        assert fingerprint(file) != before
        before = fingerprint(file)
