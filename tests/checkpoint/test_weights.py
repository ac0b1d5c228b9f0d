"""The safetensors reader against the reference implementation, on files that are right and on files that are not."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.checkpoint.weights import load_tensor, read_header, read_tensors
from dflash_trt.errors import UserError
from tests.checkpoint.sparse import write_file, write_raw

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
kinds = st.sampled_from([np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16])
arrays = st.builds(lambda shape, kind: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind), shapes, kinds)
files = st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), arrays)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reader") / "model.safetensors"


@given(files)
def test_every_tensor_of_a_reference_file_is_found_and_read(path, tensors):
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "np"}))
    refs = read_header(path)
    assert refs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        loaded = load_tensor(refs[name])
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert loaded.tobytes() == tensor.tobytes()
        assert refs[name].nbytes == tensor.nbytes


@given(files, st.data())
def test_a_corrupted_file_is_a_user_error_or_reads_as_the_reference_reads_it(path, tensors, data):
    content = bytearray(safetensors.numpy.save(tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(begin, min(len(content), begin + 4)))
        content[begin:end] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    try:
        refs = read_header(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    expected = {name: (tensor["dtype"], tensor["data"]) for name, tensor in safetensors.deserialize(bytes(content))}
    found = {name: (ref.dtype, content[ref.offset : ref.offset + ref.nbytes]) for name, ref in refs.items()}
    assert found == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(ENTRY)), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), json_values) | json_values)
def test_any_json_as_header_is_a_user_error_or_an_empty_file(path, header):
    write_raw(path, json.dumps(header).encode(), 8)
    with pytest.raises(UserError):
        read_header(path)


@given(st.sampled_from(list(ENTRY)), json_values)
def test_any_value_in_an_entry_is_a_user_error_or_the_same_tensor(path, key, value):
    write_raw(path, json.dumps({"a": ENTRY | {key: value}}).encode(), 8)
    try:
        ref = read_header(path)["a"]
    except UserError:
        return
    assert ref.nbytes == 8 and ref.offset + 8 == path.stat().st_size


@pytest.mark.parametrize(
    ("header", "data_bytes", "words"),
    [
        ({"a": ENTRY}, 7, "truncated"),
        ({"a": ENTRY}, 9, "1 bytes after the last tensor"),
        ({}, 1, "1 bytes after the last tensor"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, 12, "b overlaps"),
        ({"a": ENTRY, "b": ENTRY}, 8, "b overlaps"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, 20, "b leaves a gap"),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, 12, "a leaves a gap"),
        ({"a": ENTRY | {"shape": [3]}}, 8, "8 bytes do not hold F32 [3]"),
        ({"a": ENTRY | {"shape": [-2]}}, 8, "shape [-2]"),
        ({"a": ENTRY | {"shape": [2.0]}}, 8, "shape [2.0]"),
        ({"a": ENTRY | {"dtype": "F33"}}, 8, "dtype 'F33' is not supported"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, 8, "data_offsets [8, 0]"),
        ({"a": ENTRY | {"data_offsets": [0, 2**70]}}, 8, "bytes do not hold"),
        ({"a": {"dtype": "U8", "shape": [2**70], "data_offsets": [0, 2**70]}}, 8, "truncated"),
        ({"a": 1}, 0, "a: 1 is not an object"),
        ([], 0, "not a JSON object"),
    ],
)
def test_a_header_at_odds_with_its_data_names_the_fault(tmp_path, header, data_bytes, words):
    file = write_raw(tmp_path / "model.safetensors", json.dumps(header).encode(), data_bytes)
    with pytest.raises(UserError) as error:
        read_header(file)
    assert words in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\x10\0\0", "truncated"),
        ((16).to_bytes(8, "little") + b"{}", "truncated inside its header"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "header is too large"),
        (b"\xff" * 64, "header is too large"),
        ((2).to_bytes(8, "little") + b"{]", "not valid JSON"),
        ((4).to_bytes(8, "little") + b'{"\xff"', "not valid JSON"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not valid JSON"),
        ((16).to_bytes(8, "little") + b'{"a": 1, "a": 2}', "occurs twice"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content, words):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_header(file)


def test_paths_that_cannot_be_read_are_user_errors(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match="cannot read the file"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="cannot read the file"):
        read_tensors(tmp_path)
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        read_tensors(tmp_path / "nowhere")


def test_a_file_cut_after_reading_its_header_is_reported_as_truncated(tmp_path):
    file = write_file(tmp_path / "model.safetensors", {"a": (4, 4)}, "F32")
    ref = read_header(file)["a"]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(UserError, match="truncated inside tensor a"):
        load_tensor(ref)
    file.unlink()
    with pytest.raises(UserError, match="cannot read tensor a"):
        load_tensor(ref)


def index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def shards(tmp_path) -> Path:
    write_file(tmp_path / "1.safetensors", {"a": (2,)})
    write_file(tmp_path / "2.safetensors", {"b": (3,)})
    return tmp_path


def test_shards_are_read_with_and_without_an_index(shards):
    assert read_tensors(shards).keys() == {"a", "b"}
    index(shards, {"a": "1.safetensors", "b": "2.safetensors"})
    assert {name: ref.file.name for name, ref in read_tensors(shards).items()} == {
        "a": "1.safetensors",
        "b": "2.safetensors",
    }


def test_files_that_the_index_does_not_name_are_left_alone(shards):
    (shards / "consolidated.safetensors").write_bytes(b"another format of the same weights")
    index(shards, {"a": "1.safetensors", "b": "2.safetensors"})
    assert read_tensors(shards).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "1.safetensors", "b": "3.safetensors"}, "names 3.safetensors, which is missing"),
        ({"a": "1.safetensors", "c": "2.safetensors"}, "b of 2.safetensors is not in the index"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "a of 1.safetensors is not in the index"),
        ({"a": "1.safetensors", "c": "1.safetensors"}, "c is in the index but not in 1.safetensors"),
        ({"a": "../1.safetensors"}, "no plain file name"),
        ({"a": 1}, "no plain file name"),
        ({}, "weight_map is missing or empty"),
        (None, "weight_map is missing or empty"),
    ],
)
def test_an_index_at_odds_with_its_files_is_refused(shards, weight_map, words):
    index(shards, weight_map)
    with pytest.raises(UserError, match=words):
        read_tensors(shards)


def test_a_tensor_in_two_files_is_refused(shards):
    write_file(shards / "3.safetensors", {"a": (2,)})
    with pytest.raises(UserError, match="a is in two files"):
        read_tensors(shards)


def test_a_whole_file_beside_the_index_of_another_download_is_refused(shards):
    index(shards, {"a": "1.safetensors", "b": "2.safetensors"})
    write_file(shards / "model.safetensors", {"a": (2,), "b": (3,)})
    with pytest.raises(UserError, match=r"model\.safetensors is not named"):
        read_tensors(shards)


def test_an_index_that_is_no_json_object_is_refused(shards):
    for text in ("{", "[]", "\udcff", "[" * 100_000):
        (shards / "model.safetensors.index.json").write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json is not"):
            read_tensors(shards)
