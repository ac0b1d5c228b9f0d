"""What a recipe becomes as the YAML of `trtllm-serve --config`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.document import Problems
from dflash_trt.errors import UserError
from dflash_trt.recipes import read_recipe, recipe_files
from dflash_trt.trtllm.releases import judge, read_release
from dflash_trt.trtllm.serve_config import _lines, compose, render_config

NAME = "gpt-oss-120b-b300x8-interactive"
SERVED = [name for name in recipe_files() if not read_recipe(name).recipe.unsupported]


@pytest.fixture
def edited(tmp_path):
    """A shipped recipe with lines put in the place of others."""

    def edit(**lines: str):
        text = recipe_files()[NAME].read_text()
        for start, line in lines.items():
            [old] = [one for one in text.splitlines() if one.lstrip().startswith(f"{start}:")]
            text = text.replace(old, line)
        (tmp_path / f"{NAME}.yaml").write_text(text)
        return read_recipe(str(tmp_path / f"{NAME}.yaml"))

    return edit


@pytest.mark.parametrize("name", SERVED)
def test_every_recipe_renders_to_yaml_that_its_release_takes(name):
    loaded = read_recipe(name)
    rendered = render_config(loaded)
    assert yaml.safe_load(rendered.text) == rendered.config
    assert judge(read_release(loaded.recipe.release), rendered.config) == []
    assert all(len(line) < 160 and line.isprintable() for line in rendered.text.splitlines())


def test_a_recipe_says_what_the_file_says():
    config = render_config(read_recipe(NAME), draft=Path("/somewhere/else")).config
    assert config["max_batch_size"] == config["cuda_graph_config"]["max_batch_size"] == 64
    assert config["max_num_tokens"] >= 64 * 10 and config["max_seq_len"] == 65536
    assert config["tensor_parallel_size"] == 8 and config["moe_expert_parallel_size"] == 1
    assert config["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.8, "dtype": "auto", "enable_block_reuse": False,
    }  # fmt: skip
    assert config["speculative_config"] == {
        "decoding_type": "DFlash", "speculative_model": "/somewhere/else", "max_draft_len": 9,
        "attention_backend": "TRTLLM",
    }  # fmt: skip


def test_the_release_that_lacks_a_key_is_told_with_the_recipes_line():
    loaded = read_recipe(NAME)
    older = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"release": "1.3.0rc20"}))
    with pytest.raises(Problems) as raised:
        render_config(older)
    [problem] = raised.value.problems
    assert "1.3.0rc20 has no speculative_config.attention_backend" in problem.what
    assert problem.line == loaded.document.line(("drafter", "attention_backend"))
    plain = older.recipe.model_copy(
        update={"drafter": older.recipe.drafter.model_copy(update={"attention_backend": "VANILLA"})}
    )
    config = render_config(dataclasses.replace(older, recipe=plain)).config
    assert "attention_backend" not in config["speculative_config"]  # the default, which needs no key


def test_options_are_judged_and_merged_and_may_not_contradict(edited):
    loaded = edited(
        options="options:\n  kv_cache_config:\n    host_cache_size: 0",
        enable_chunked_prefill="  context_recompute_tail: 3\n  max_batch_size: 9\n  max_beam_width: one",
    )
    with pytest.raises(Problems) as raised:
        render_config(loaded)
    found = {problem.what.split()[0]: problem for problem in raised.value.problems}
    assert set(found) == {"context_recompute_tail", "options.max_batch_size", "max_beam_width"}
    assert found["context_recompute_tail"].fix == "its place is speculative_config.context_recompute_tail"
    assert "is what limits.batch says" in found["options.max_batch_size"].what
    assert all(problem.line == loaded.document.line(("options", key.split(".")[-1])) for key, problem in found.items())
    kept = edited(options="options:\n  kv_cache_config:\n    host_cache_size: 0")
    assert render_config(kept).config["kv_cache_config"]["host_cache_size"] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model: /x", "options.model is what target says — leave one out"),
        (
            "speculative_config: {speculative_model_dir: /x}",
            "speculative_model_dir is what drafter says",
        ),
        ("kv_cache_config: fp8", "options.kv_cache_config is 'fp8', but it is a section — indent its keys below it"),
        ("cuda_graph_config: null", "options.cuda_graph_config is null, but it is a section"),
    ],
)
def test_the_same_thing_under_another_name_is_a_contradiction(edited, line, said):
    loaded = edited(options=f"options:\n  {line}")
    composed = compose(loaded)
    [problem] = composed.problems
    assert said in str(problem) and problem.line == loaded.document.line(("options", line.partition(":")[0]))
    with pytest.raises(Problems, match="options"):
        composed.consistent()


def test_what_is_composed_may_still_be_wrong(edited):
    """Preflight has a rule for keys, so it gets them; nothing has one for a release that nobody knows."""
    composed = compose(edited(options="options:\n  enable_chunked_prefil: true")).consistent()
    assert "enable_chunked_prefil" in composed.config and composed.problems == ()
    assert [problem.what.split()[0] for problem in composed.judged()] == ["enable_chunked_prefil"]
    with pytest.raises(Problems, match=r"no table for TensorRT-LLM 1\.9.*line 9 — tables are there for"):
        compose(edited(release='release: "1.9"')).consistent()
    assert compose(edited(release="release: 1.2.1")).consistent()  # preflight says that it has no DFlash


def test_a_folder_whose_name_no_yaml_can_hold_is_refused():
    with pytest.raises(UserError, match="its name is not UTF-8"):
        render_config(read_recipe(NAME), target=Path(os.fsdecode(b"/m/\xff")))


def test_what_does_not_work_today_is_refused_with_the_reason():
    loaded = read_recipe("kimi-k2.6-b200x8-latency")
    with pytest.raises(UserError, match="does not work today: TensorRT-LLM's support matrix says No"):
        render_config(loaded)


def test_recipes_of_other_lanes_have_no_such_file(edited):
    with pytest.raises(UserError, match="a recipe of the lane engine"):
        render_config(edited(lane="lane: engine"))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
KEYS = st.text(min_size=1, max_size=8)


@given(
    st.dictionaries(
        KEYS,
        st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)),
        max_size=4,
    )
)
def test_any_values_are_written_so_that_yaml_reads_them_back(values):
    text = "".join(f"{line}\n" for line in _lines(values, {}, ())) or "{}"
    assert yaml.safe_load(text) == values
