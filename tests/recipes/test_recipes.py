"""A recipe is read whole or refused with everything that is wrong with it, each with its line and what to write."""

from __future__ import annotations

import copy

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.document import Problems
from dflash_trt.errors import UserError
from dflash_trt.recipes import read_recipe, recipe_files

GOOD = {
    "recipe": 1,
    "name": "tiny",
    "description": "A pair on eight GPUs.",
    "goal": "interactive",
    "gpus": "B300x8",
    "lane": "serve",
    "release": "1.3.0rc27",
    "target": {"checkpoint": "openai/gpt-oss-120b", "precision": "mxfp4"},
    "drafter": {"checkpoint": "z-lab/gpt-oss-120b-DFlash", "precision": "bf16"},
    "block_size": 10,
    "draft_length": 9,
    "parallel": {"tp": 8, "ep": 4},
    "limits": {"batch": 32, "sequence": 32768, "tokens": 8192},
    "kv_cache": {"fraction": 0.8},
}


def change(keys, value):
    """GOOD with one key set, or removed if the value is None."""
    values = copy.deepcopy(GOOD)
    *sections, last = keys.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return values


def read(folder, values):
    file = folder / "tiny.yaml"
    file.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return read_recipe(str(file))


def problems(folder, values):
    with pytest.raises(Problems) as error:
        read(folder, values)
    return [(problem.line, str(problem)) for problem in error.value.problems]


def test_a_recipe_is_read_with_its_defaults(tmp_path):
    recipe = read(tmp_path, GOOD).recipe
    assert (recipe.machine.total, recipe.parallel.pp, recipe.parallel.attention_dp) == (8, 1, False)
    assert recipe.drafter.attention_backend == "VANILLA" and recipe.kv_cache.dtype == "auto"


@pytest.mark.parametrize(
    "keys, value, said",
    [
        ("limits.sequence", "32k", "write 32000, without a unit"),
        ("limits.sequence", "32Ki", "write 32768, without a unit"),
        ("limits.batch", "32 requests", "write 32, without a unit"),
        ("limits.tokens", "8,192", "write 8192, without a unit"),
        ("kv_cache.fraction", "80%", "write 0.8, a share between 0 and 1"),
        ("kv_cache.fraction", 80, "write 0.8 for 80 %"),
        ("container", {"image": "x", "shared_memory": "64GB"}, "write it as 64 GiB"),
        ("container", {"image": "x", "shared_memory": 64}, "write it as 64 GiB"),
        ("goal", "fast", "write latency, interactive or throughput"),
        ("lane", "vllm", "write serve, trtllm-build or engine"),
        ("target.precision", "int4", "write bf16, fp8, mxfp4 or nvfp4"),
        ("gpus", "A100x8", "known: B300"),
        ("gpus", 8, "known: B300"),
        ("nodes", 0, "nodes is 0 — write 1 or more"),
        ("nodes", True, "nodes is true — write a whole number"),
        ("limits.batch", 1.5, "limits.batch is 1.5 — write a whole number"),
        ("limits.batch", 32.0, "write 32, without a unit"),
        ("limits.batch", "1e2", "write 100, without a unit"),
        ("kv_cache.fraction", "80 %", "write 0.8, a share between 0 and 1"),
        ("kv_cache.fraction", "0,8", "write 0.8, a share between 0 and 1"),
        ("kv_cache.fraction", True, "kv_cache.fraction is true — write a number between 0 and 1"),
        ("kv_cache.fraction", 1.001, "write 1 or less"),
        ("parallel", {"tp": 8, "attention_dp": "yes"}, "attention_dp is 'yes' — write true or false"),
        ("block_size", 1, "block_size is 1 — write 2 or more"),
        ("description", "a\u2028max_batch_size: 1", "holds the character U+2028 — write one line"),
        ("description", "x" * 5000, "write at most 4096 characters"),
        ("release", 1.4, 'release is 1.4 — write it in quotes: "1.4"'),
        ("notes", "one", "it is a list: write one `- …` a line"),
        ("options", {7: 1}, "the key 7 is no text"),
        ("target.checkpoint", "../..", "write OWNER/NAME, as on Hugging Face"),
        ("target.path", "a" * 3000, "but there is no"),
        ("tp", 8, "tp is not a known key — its place is parallel.tp"),
        ("environment", {"A": "a\0"}, "environment.A holds the character U+0000"),
        ("environment", {"HOST": "::1"}, "is a variable of the launchers or of their shell"),
        ("environment", {"EUID": "3"}, "is a variable of the launchers or of their shell"),
        ("environment", {"HF_TOKEN": "hf_x"}, "is a secret, and rendered files are for all to read"),
        ("options.env_overrides", {"WANDB_API_KEY": "x"}, "is a secret"),
        ("draft_length", 10, "write 9 or less"),
        ("limits.tokens", 319, "write 320 or more"),
        ("parallel.ep", 3, "does not divide tp 8"),
        ("parallel.tp", 4, "makes 4 ranks of tp 4 x pp 1 for 8 GPUs"),
        ("parallel.pp", 2, "makes 16 ranks"),
        ("nodes", 2, "for 16 GPUs"),
        ("drafter.path", "nowhere", "there is no"),
        ("release", None, "release is missing"),
        ("kv_cache", None, "kv_cache is missing"),
        ("recipe", 2, "write 1"),
        ("name", "other", "write tiny, as the file"),
        ("name", "Über", "write small letters and digits"),
        ("max_draft_length", 3, "did you mean draft_length?"),
        ("drafter.atention_backend", "TRTLLM", "drafter.atention_backend is not a known key — did you mean attention"),
        ("parallel.cp", 2, "parallel.cp is not a known key"),
        ("target.revision", "main", "write a commit"),
        ("environment", {"A B": "1"}, "write letters, digits and _"),
        ("environment", {"A": 1}, 'environment.A is 1 — write it in quotes: "1"'),
        ("target", "openai/gpt-oss-120b", "target is 'openai/gpt-oss-120b' — it is a section"),
        ("limits", [1], "limits is [1]"),
    ],
)
def test_one_mistake_is_one_problem_with_its_line_and_the_fix(tmp_path, keys, value, said):
    values = change(keys, value)
    [(line, what)] = problems(tmp_path, values)
    assert said in what
    if value is not None:
        text = yaml.safe_dump(values, sort_keys=False).splitlines()
        inner = map(str, value if isinstance(value, dict) else ())
        named = [keys.split(".")[-1], "parallel", "shared_memory", *inner]
        assert line is not None and any(name in text[line - 1] for name in named)
    elif line is not None:
        pytest.fail("what is missing at top level has no line")


def test_a_section_that_is_none_is_one_problem(tmp_path):
    text = yaml.safe_dump(change("parallel", [8, 1]), sort_keys=False)
    assert [what for _, what in problems(tmp_path, text)] == [
        "line 16: parallel is [8, 1] — it is a section: write its keys below it, indented"
    ]


def test_all_mistakes_are_told_at_once(tmp_path):
    values = change("limits.sequence", "32k") | {"goal": "fast", "extra": 1, "draft_length": 12}
    assert [line for line, _ in problems(tmp_path, values)] == [4, 15, 21, 25]


def test_paths_are_relative_to_the_recipe(tmp_path):
    (tmp_path / "models" / "draft").mkdir(parents=True)
    (tmp_path / "models" / "draft" / "config.json").write_text("{}")
    assert read(tmp_path, change("drafter.path", "models/draft")).recipe.drafter.path is not None


def test_a_name_that_is_neither_recipe_nor_file_is_refused():
    with pytest.raises(UserError, match="there is no recipe and no file 'nonsense'"):
        read_recipe("nonsense")


def test_every_recipe_of_the_package_is_read():
    assert recipe_files()
    for name in recipe_files():
        assert read_recipe(name).recipe.name == name


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=6) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(
    junk=st.dictionaries(
        st.sampled_from([*GOOD, "nodes", "container", "environment", "options", "notes", "moe_backend", "x", 1]),
        JUNK,
        min_size=1,
        max_size=3,
    )
)
def test_whatever_stands_in_a_recipe_is_read_or_refused_in_words(junk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("junk")
    try:
        read(folder, GOOD | junk)
    except UserError as error:
        assert "tiny.yaml" in str(error)
