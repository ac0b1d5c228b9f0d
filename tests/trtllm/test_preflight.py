"""Preflight of files and recipes: where its knowledge comes from, and that nothing is said twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_trt.document import Problems
from dflash_trt.errors import UserError
from dflash_trt.gpus import parse_gpus
from dflash_trt.published import published
from dflash_trt.recipes import FOLDER, read_recipe, recipe_files
from dflash_trt.trtllm.deployment import find_drafter, find_target
from dflash_trt.trtllm.preflight import (
    ERROR,
    SEVERITIES,
    count,
    deployment_of_config,
    deployment_of_recipe,
    preflight,
    summary,
)
from tests.trtllm.rules.build import CONFIG, DRAFT, GONE, TARGET, change, deployment, write

SERVED = [
    name
    for name in recipe_files()
    if (recipe := read_recipe(name).recipe).lane == "serve" and recipe.unsupported is None
]


@pytest.mark.parametrize("name", SERVED)
def test_no_recipe_of_ours_has_errors(name):
    assert count(preflight(deployment_of_recipe(read_recipe(name))))[ERROR] == 0


def test_recipes_marked_as_unsupported_say_why():
    name = next(name for name in recipe_files() if read_recipe(name).recipe.unsupported)
    with pytest.raises(UserError, match="does not work today"):
        deployment_of_recipe(read_recipe(name))


def test_a_finding_of_a_recipe_has_the_recipes_line(tmp_path):
    file = tmp_path / f"{SERVED[0]}.yaml"
    text = (FOLDER / file.name).read_text()
    assert "prefix_reuse" not in text
    file.write_text(text.replace("kv_cache:\n", "kv_cache:\n  prefix_reuse: true\n"))
    [finding] = [one for one in preflight(deployment_of_recipe(read_recipe(str(file)))) if one.rule == "DF071"]
    assert file.read_text().splitlines()[finding.line - 1] == "  prefix_reuse: true"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e308, 10**400, -1])
def test_a_fraction_that_is_none_is_an_error_and_no_end(wrong):
    judged = deployment({"kv_cache_config.free_gpu_memory_fraction": wrong})
    assert "DF025" in [one.rule for one in preflight(judged) if one.severity == ERROR]
    json.dumps(summary(judged), allow_nan=False)


@pytest.mark.parametrize("key", ["max_seq_len", "max_batch_size", "max_num_tokens", "tensor_parallel_size"])
def test_numbers_beyond_all_measure_are_judged_as_well(key):
    judged = deployment({key: 10**400})
    preflight(judged)
    json.dumps(summary(judged), allow_nan=False)


def test_a_local_drafter_is_no_target(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(published(DRAFT).config)))
    found = find_target(str(tmp_path))
    assert found.shape is None and "is a drafter, not a target" in found.fault and "swapped" in found.fix


def test_errors_come_first_and_rules_in_their_order():
    found = preflight(deployment({"max_num_tokens": 8, "kv_cache_config": GONE, "backend": "_autodeploy"}))
    keys = [(SEVERITIES.index(one.severity), one.rule) for one in found]
    assert keys == sorted(keys) and {one.severity for one in found} >= {"error", "warning"}


def test_unknown_keys_come_with_the_rules_findings(tmp_path):
    changes = {"max_num_tokens": 8, "max_bach_size": 4, "kv_cache_config.free_gpu_memory_fracton": 0.8}
    file = write(tmp_path, change(CONFIG, changes)).file
    found = [one for one in preflight(deployment_of_config(file, target=TARGET)) if one.severity == ERROR]
    assert [one.rule for one in found] == ["DF000", "DF000", "DF012"]
    lines = file.read_text().splitlines()
    assert {lines[one.line - 1].split(":")[0].strip() for one in found} == {
        "max_bach_size", "free_gpu_memory_fracton", "max_num_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"speculative_config.decoding_type": "dflash"}, "DF002"),
        ({"speculative_config.max_draft_len": GONE}, "DF004"),
        ({"backend": "tensorrt"}, "DF006"),
        ({"kv_cache_config.free_gpu_memory_fraction": 80}, "DF025"),
    ],
)
def test_what_a_rule_explains_the_table_does_not_repeat(changes, rule, tmp_path):
    file = write(tmp_path, change(CONFIG, changes)).file
    found = [one.rule for one in preflight(deployment_of_config(file, target=TARGET)) if one.severity == ERROR]
    assert found == [rule]


def test_keys_of_later_releases_are_refused(tmp_path):
    file = write(tmp_path, CONFIG).file
    found = preflight(deployment_of_config(file, target=TARGET, release="1.3.0rc20"))
    assert any(one.rule == "DF000" and "attention_backend" in one.what for one in found)


def test_a_release_without_dflash_is_refused_as_that(tmp_path):
    file = write(tmp_path, CONFIG).file
    found = preflight(deployment_of_config(file, target=TARGET, release="1.2.1"))
    assert [one.rule for one in found if one.severity == ERROR] == ["DF005"]


def test_a_release_nobody_knows_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no table"):
        deployment_of_config(write(tmp_path, CONFIG).file, release="9.9.9")


def test_a_file_that_is_no_yaml_has_its_problems(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max_batch_size: 4\nmax_batch_size: 8\nmax_seq_len: 1\nmax_seq_len: 2\n")
    with pytest.raises(Problems, match="2 problems"):
        deployment_of_config(file)


def test_the_pair_comes_from_the_file_unless_somebody_says_otherwise(tmp_path):
    config = change(CONFIG, {"model": TARGET})
    file = write(tmp_path, config).file
    judged = deployment_of_config(file)
    assert (judged.target.name, judged.drafter.name) == (TARGET, DRAFT)
    assert deployment_of_config(file, target="Qwen/Qwen3-8B").target.name == "Qwen/Qwen3-8B"
    assert str(judged.gpus) == "B300x8"
    assert str(deployment_of_config(file, gpus=parse_gpus("B200x4")).gpus) == "B200x4"


def folder(tmp_path: Path, repository: str) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(published(repository).config))
    return tmp_path


def test_a_folder_is_read_as_its_published_config_is(tmp_path):
    shape = find_drafter(str(folder(tmp_path, DRAFT))).shape
    assert shape.target_layer_ids == published(DRAFT).drafter_shape().target_layer_ids


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere"])
def test_paths_that_do_not_exist_are_faults(name):
    assert "does not exist" in find_target(name).fault


def test_a_file_is_no_checkpoint(tmp_path):
    file = tmp_path / "model.bin"
    file.touch()
    assert "is no directory" in find_target(str(file)).fault


def test_a_name_to_download_is_no_fault_but_not_known():
    source = find_target("somebody/else")
    assert (source.fault, source.shape) == (None, None)


def test_target_and_drafter_are_not_swapped():
    assert "is a drafter, not a target" in find_target(DRAFT).fault
    assert "is a target, not a drafter" in find_drafter(TARGET).fault


def test_a_folder_without_sizes_is_a_fault_that_names_the_key(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert "num_hidden_layers" in find_target(str(tmp_path)).fault


def test_an_anchor_that_drafts_makes_a_block_one_wider():
    sizes = {
        "max_num_tokens": 32768,
        "speculative_config.max_draft_len": 10,
        "speculative_config.decoding_type": "DSpark",
    }
    found = preflight(deployment(sizes, draft_is={"variant": "DSpark"}))
    assert not {"DF010", "DF011"} & {one.rule for one in found}


@pytest.mark.parametrize(("algorithm", "precision"), [("NVFP4", "nvfp4"), ("W4A16_NVFP4", "nvfp4"), ("FP8", "fp8")])
def test_precision_is_what_the_quantization_file_says(algorithm, precision, tmp_path):
    folder(tmp_path, "Qwen/Qwen3-8B")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    assert find_target(str(tmp_path)).precision == precision


def test_the_weights_of_a_folder_are_its_files(tmp_path):
    folder(tmp_path, "Qwen/Qwen3-8B")
    sample = next(Path(__file__).parents[1].rglob("*.safetensors"), None)
    if sample is None:
        header = b'{"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    else:
        shutil.copy(sample, tmp_path / "model.safetensors")
    source = find_target(str(tmp_path))
    assert source.size == (tmp_path / "model.safetensors").stat().st_size and source.tensors


def test_the_summary_says_what_the_memory_goes_to():
    memory = summary(deployment({"speculative_config.attention_backend": "VANILLA"}))["memory"]
    arena = 2 * 8 * 17 * (32768 + 10) * 1 * 64 * 2
    assert memory["arena"] == arena and not memory["arena_in_kv_cache"]
    assert memory["kv_cache"] == pytest.approx((memory["card"] - memory["weights"] - (4 << 30) - arena) * 0.8)


def test_without_a_target_nothing_is_made_up():
    facts = summary(deployment(target_source={"shape": None, "name": None}))
    assert facts["memory"]["weights"] is None and facts["memory"]["kv_cache"] is None
    assert facts["target"] == {"name": None, "known": False, "precision": "mxfp4"}
