"""The manifest is read strictly: what it says is what is meant, and anything else is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.engine.manifest import NAME, Limits, read_manifest
from dflash_trt.errors import UserError
from dflash_trt.graph.mapping import Mapping

NUMBERS = [f"{name}.{field.name}" for name, of in (("limits", Limits), ("mapping", Mapping)) for field in fields(of)]


def edit(engine, **values) -> None:
    file = engine / NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_what_is_written_is_read(converted, tmp_path):
    manifest = read_manifest(converted)
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("found", ["2.0", "10.3", "", None, 1.0])
def test_another_major_version_is_refused_naming_both(engine, found):
    edit(engine, format=found)
    with pytest.raises(UserError, match=r"reads 1\.x") as error:
        read_manifest(engine)
    assert repr(found) in str(error.value)


def test_a_newer_minor_version_with_unknown_keys_is_read(engine):
    before = read_manifest(engine)
    edit(engine, format="1.7", colour={"of": ["the", "bikeshed"]})
    assert read_manifest(engine).files == before.files


def test_keys_that_version_1_0_did_not_have_take_their_defaults(converted, tmp_path):
    values = json.loads((converted / NAME).read_text())
    del values["ops"], values["target"]["nvfp4"], values["draft"]["nvfp4"]
    (tmp_path / NAME).write_text(json.dumps(values | {"format": "1.0"}))
    old = read_manifest(tmp_path)
    assert (old.ops, old.target.nvfp4, old.draft.nvfp4) == ("native", None, None)


def test_every_missing_key_is_named(converted, tmp_path):
    values = json.loads((converted / NAME).read_text())
    for key in values.keys() - {"format", "ops", "moe"}:
        (tmp_path / NAME).write_text(json.dumps({name: value for name, value in values.items() if name != key}))
        with pytest.raises(UserError, match=rf"^{key} is missing — .*{NAME} — .*convert"):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dtype": 16}, "dtype is 16, not a string"),
        ({"limits": {"max_batch": "8"}}, "limits.max_batch is '8', not an integer"),
        ({"eos_ids": [2, None]}, r"eos_ids\[1\] is None, not an integer"),
        ({"files": ["rank0.onnx"]}, "files is .*, not an object"),
        ({"files": {"a": {"size": True, "fingerprint": ""}}}, r"files\.a\.size is True, not an integer"),
        ({"target": None}, "target is None, not an object"),
    ],
)
def test_an_ill_typed_value_is_named_with_its_path(engine, values, words):
    edit(engine, **values)
    with pytest.raises(UserError, match=words):
        read_manifest(engine)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_limit_or_number_of_ranks_below_1_is_named_with_its_value(engine, name, value):
    section, key = name.split(".")
    edit(engine, **{section: json.loads((engine / NAME).read_text())[section] | {key: value}})
    with pytest.raises(UserError, match=rf"^{name} is {value}, not 1 or more — .*{NAME} — .*convert"):
        read_manifest(engine)


@pytest.mark.parametrize("graph", ["rank0.onnx", "rank0.cpu.onnx", "rank0-ar.onnx", "rank0-ar.cpu.onnx"])
def test_files_must_name_every_graph(engine, graph):
    """Without its entry nobody would notice that a graph is another, or gone."""
    files = json.loads((engine / NAME).read_text())["files"]
    del files[graph]
    edit(engine, files=files)
    with pytest.raises(UserError, match=rf"^files does not name {graph} — .*{NAME} — .*convert"):
        read_manifest(engine)


def test_files_must_name_the_graphs_of_every_rank(engine):
    edit(engine, mapping={"tp": 2, "ep": 1})
    with pytest.raises(UserError, match=r"^files does not name rank1.*\.onnx — "):
        read_manifest(engine)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(data=st.data(), value=JSON)
def test_any_value_under_any_key_is_read_or_refused(converted, tmp_path_factory, data, value):
    values = json.loads((converted / NAME).read_text())
    level = values
    key = data.draw(st.sampled_from(sorted(level)))
    while isinstance(level[key], dict) and level[key] and data.draw(st.booleans()):
        level = level[key]
        key = data.draw(st.sampled_from(sorted(level)))
    level[key] = value
    folder = tmp_path_factory.getbasetemp()
    (folder / NAME).write_text(json.dumps(values))
    try:
        read_manifest(folder)
    except UserError as error:
        assert NAME in str(error)


def test_a_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="it has no manifest"):
        read_manifest(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        read_manifest(tmp_path / "absent")
    (tmp_path / NAME).write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_manifest(tmp_path)
