"""Safetensors written in pieces are those that others read, or they are not there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dflash_trt.checkpoint import load_tensor, read_header, read_tensors
from dflash_trt.checkpoint.shards import ShardWriter, Slot, name_shards, write_index
from dflash_trt.checkpoint.weights import DTYPES

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
KINDS = st.sampled_from(["U8", "BF16", "F32", "F8_E4M3", "I64"])


def content(slot: Slot, seed: int) -> np.ndarray:
    """Random bytes of the slot's size."""
    return np.random.default_rng(seed).integers(0, 256, slot.nbytes, np.uint8)


@given(kinds=st.lists(st.tuples(KINDS, SHAPES), min_size=1, max_size=6), order=st.randoms(use_true_random=False))
def test_pieces_in_any_order_of_tensors_are_the_file_that_safetensors_reads(tmp_path_factory, kinds, order):
    slots = [Slot(f"tensor.{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    whole = {slot.name: content(slot, seed) for seed, slot in enumerate(slots)}
    pieces = [name for name, data in whole.items() for _ in range(min(3, len(data)))]
    order.shuffle(pieces)
    file = tmp_path_factory.mktemp("shards") / "model.safetensors"
    written = dict.fromkeys(whole, 0)
    with ShardWriter(file, slots) as writer:
        for i, name in enumerate(pieces):
            last = name not in pieces[i + 1 :]
            end = len(whole[name]) if last else min(len(whole[name]), written[name] + 7)
            writer.write(name, whole[name][written[name] : end])
            written[name] = end
    refs = read_header(file)
    for slot in slots:
        ref = refs[slot.name]
        assert (ref.dtype, ref.shape) == (slot.dtype, slot.shape)
        assert load_tensor(ref).tobytes() == whole[slot.name].tobytes()
        assert ref.offset % DTYPES[ref.dtype].itemsize == 0
    with safe_open(file, "numpy") as theirs:
        assert {*theirs.keys()} == whole.keys() and theirs.metadata() == {"format": "pt"}


def test_values_come_with_their_type(tmp_path):
    with ShardWriter(tmp_path / "x.safetensors", [Slot("w", "F32", (2, 3)), Slot("s", "F32", ())]) as writer:
        writer.write("w", np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1])
        writer.write("s", np.array(0.5, np.float32))
        with pytest.raises(ValueError, match="F32"):
            writer.write("w", np.zeros(1, np.float64))
    refs = read_header(tmp_path / "x.safetensors")
    assert load_tensor(refs["w"]).tolist() == [[2, 1, 0], [5, 4, 3]] and load_tensor(refs["s"]) == 0.5


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="w is not complete"), ShardWriter(file, [Slot("w", "U8", (4,))]) as writer:
        writer.write("w", np.zeros(3, np.uint8))
        assert not file.exists()
    with pytest.raises(KeyboardInterrupt), ShardWriter(file, [Slot("w", "U8", (0,))]):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors.partial"]


def test_too_many_values_are_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="4 bytes"), ShardWriter(file, [Slot("w", "U8", (4,))]) as writer:
        writer.write("w", np.zeros(5, np.uint8))


def test_two_tensors_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="share a name"):
        ShardWriter(tmp_path / "x.safetensors", [Slot("w", "U8", (4,)), Slot("w", "U8", (4,))])


def test_shards_and_their_index_are_a_checkpoint(tmp_path):
    slots = [Slot(f"w{i}", "U8", (i,)) for i in range(3)]
    shards = {file: [slot] for file, slot in zip(name_shards(3), slots, strict=True)}
    for file, (slot,) in shards.items():
        with ShardWriter(tmp_path / file, [slot]) as writer:
            writer.write(slot.name, np.zeros(slot.nbytes, np.uint8))
    write_index(tmp_path, shards)
    assert {name: ref.file.name for name, ref in read_tensors(tmp_path).items()} == {
        "w0": "model-00001-of-00003.safetensors",
        "w1": "model-00002-of-00003.safetensors",
        "w2": "model-00003-of-00003.safetensors",
    }
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 3}


def test_one_shard_has_no_index(tmp_path):
    write_index(tmp_path, {name: [] for name in name_shards(1)})
    assert name_shards(1) == ["model.safetensors"] and not [*tmp_path.iterdir()]
