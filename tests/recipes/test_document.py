"""YAML files are read as TensorRT-LLM reads them, and all that is wrong with one is said at once, with its line."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.document import LARGEST, Problem, Problems, nearest, read_document, shown, unknown_key
from dflash_trt.errors import UserError

WORDS = st.text("abcdefgh_", min_size=1, max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
TREES = st.dictionaries(
    WORDS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4)),
    min_size=1,
    max_size=6,
)


def write(folder, text):
    file = folder / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@settings(max_examples=40)
@given(tree=TREES, flow=st.booleans())
def test_values_are_those_of_the_safe_loader_and_every_key_has_a_line(tree, flow, tmp_path_factory):
    text = yaml.safe_dump(tree, default_flow_style=flow)
    document = read_document(write(tmp_path_factory.mktemp("yaml"), text))
    assert document.values == yaml.safe_load(text)
    lines = text.splitlines()

    def visit(value, keys):
        line = document.line(keys)
        if keys:
            assert line is not None and 1 <= line <= len(lines)
            if isinstance(keys[-1], str) and not flow:
                assert keys[-1] in lines[line - 1]
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                visit(inner, (*keys, key))
            else:
                assert document.line((*keys, key)) is not None

    visit(document.values, ())


def test_a_key_that_is_not_there_has_the_line_of_its_parent(tmp_path):
    document = read_document(write(tmp_path, "a: 1\nb:\n  c: 2\n"))
    assert document.line(("b", "c")) == 3
    assert document.line(("b", "d")) == document.line(("b",)) == 2
    assert document.line(("x", "y")) is None


def test_all_duplicate_keys_are_told_at_once_with_both_lines(tmp_path):
    file = write(tmp_path, "a: 1\nb: {c: 1, c: 2}\na: 3\n")
    with pytest.raises(Problems) as error:
        read_document(file)
    assert [(problem.line, problem.what) for problem in error.value.problems] == [
        (2, "c stands twice, first on line 2"),
        (3, "a stands twice, first on line 1"),
    ]
    assert str(error.value).startswith(f"2 problems in {file}:\n  line 2: ")


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- 1\n- 2\n", "is not a mapping"),
        ("just words", "is not a mapping"),
        ("a: [1\nb: 2\n", "is not YAML"),
        ("a: 1\n\tb: 2\n", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: &x 1\nb: *x\n", "aliases"),
        ("a: !!python/object/apply:os.system [id]\n", "the tag"),
        ("a: !secret x\n", "the tag !secret is not read here"),
        ("a: 1\n<<: {b: 2}\n", "line 2 — write them out"),
        ("a: 1\nb: 010\n", "010 is 8 in YAML"),
        ("a: 1:30\n", "1:30 is 90 in YAML"),
        ("{[1, 2]: 3}\n", "a key is no plain word"),
        ("b: 1\na: 2026-13-45\n", "line 2"),
        ("a: 1\nb: \x01\n", "holds the character U+0001 — "),
        (b"a: 1\nb: \xff\xfe\n", "line 2"),
        ("a: " + "[" * 1500 + "]" * 1500, "deep"),
        (b"a: " + b"x" * LARGEST, "larger than 256 KiB"),
    ],
)
def test_what_is_no_mapping_of_settings_is_refused_in_one_line(tmp_path, text, said):
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_document(file)
    assert said in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_values_in_messages_are_yaml_and_short():
    assert [shown(value) for value in (None, True, "a", 1.5)] == ["null", "true", "'a'", "1.5"]
    assert len(shown("x" * 5000)) == 80
    assert str(Problem("a\nb is odd", 3)) == r"line 3: a\nb is odd"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert read_document(write(tmp_path, b"\xef\xbb\xbfa: 1\n")).values == {"a": 1}


def test_files_that_are_not_there_are_named(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot read"):
            read_document(path)


def test_the_nearest_name_is_suggested():
    assert nearest("max_draft_length", ["max_draft_len", "max_batch_size"]) == "max_draft_len"
    assert nearest("zzz", ["max_draft_len"]) is None
    said = str(unknown_key("tpp", ["tp", "ep"], 3, "parallel."))
    assert said == "line 3: parallel.tpp is not a known key — did you mean tp?"
    assert str(Problem("is odd")) == "is odd"
