"""An engine directory is opened only if every file, its own and the checkpoints', is what the manifest says."""

from __future__ import annotations

import shutil

import pytest

from dflash_trt.engine import convert, open_engine
from dflash_trt.errors import UserError
from tests.tiny import make_pair


def test_an_untouched_directory_opens_even_after_it_moved(engine, tmp_path):
    engine.rename(tmp_path / "elsewhere")
    opened = open_engine(tmp_path / "elsewhere")
    assert opened.graph().name == "rank0.cpu.onnx"
    assert opened.graph(draft=False, cpu=False).name == "rank0-ar.onnx"


@pytest.mark.parametrize("name", ["rank0.onnx", "rank0-ar.cpu.onnx", "tokenizer.json"])
def test_a_changed_file_is_named_with_both_fingerprints(engine, name):
    content = bytearray((engine / name).read_bytes())
    content[len(content) // 2] ^= 1
    (engine / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"fingerprint \w+…; the manifest says \w+… — .*{name}"):
        open_engine(engine)


def test_a_shorter_file_is_named_with_both_sizes(engine):
    content = (engine / "rank0.onnx").read_bytes()
    (engine / "rank0.onnx").write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{len(content) - 1} bytes; the manifest says {len(content)}"):
        open_engine(engine)


def test_a_missing_file_is_named(engine):
    (engine / "rank0.onnx").unlink()
    with pytest.raises(UserError, match=r"gone — .*rank0.onnx"):
        open_engine(engine)


def test_a_checkpoint_that_moved_is_named_with_the_fix(tmp_path):
    target, draft = make_pair(tmp_path)
    engine = convert(target, draft, tmp_path / "engine").path
    draft.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"gone — .*draft/model.safetensors — put it back, or .*convert"):
        open_engine(engine)
    (tmp_path / "moved").rename(draft)
    open_engine(engine)


def test_a_checkpoint_that_was_retrained_is_refused(tmp_path):
    target, draft = make_pair(tmp_path)
    engine = convert(target, draft, tmp_path / "engine").path
    shutil.rmtree(draft)
    make_pair(tmp_path / "again", seed=9)[1].rename(draft)
    with pytest.raises(UserError, match=r"was changed: fingerprint .* — .*draft/model.safetensors"):
        open_engine(engine)


def test_a_link_that_leads_elsewhere_is_refused(engine):
    link = engine / "weights" / "draft.model.safetensors"
    link.unlink()
    link.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="does not lead to"):
        open_engine(engine)


def test_an_engine_without_drafter_has_one_graph_and_says_so(pair, tmp_path):
    engine = convert(pair[0], None, tmp_path / "engine", max_seq_len=64)
    assert engine.limits.block_size == 1 and engine.graph(draft=False).is_file()
    with pytest.raises(UserError, match="no drafter"):
        engine.graph()


def test_an_sm_that_was_not_built_is_named_with_the_command(converted):
    with pytest.raises(UserError, match=r"no engine for SM120 \(built: none\) — .* — run `dflash-trt build"):
        open_engine(converted).compiled(120)
