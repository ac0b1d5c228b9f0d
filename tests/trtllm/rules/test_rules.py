"""Every rule lets a good deployment pass and names what is wrong with a bad one."""

from __future__ import annotations

import pytest

from dflash_trt.trtllm.deployment import Deployment, Finding
from dflash_trt.trtllm.rules import RULES
from tests.trtllm.rules.build import CONFIG, GONE, change, deployment, write
from tests.trtllm.rules.examples import EXAMPLES, SPEC, VANILLA, config


def found(rule: str, judged: Deployment) -> list[Finding]:
    return list(RULES[rule].findings(judged))


def test_every_rule_has_an_example_and_every_example_a_rule():
    assert EXAMPLES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_what_is_right_passes(rule):
    assert found(rule, deployment(**EXAMPLES[rule].passes)) == []


@pytest.mark.parametrize("rule", RULES)
def test_what_is_wrong_is_named(rule):
    example = EXAMPLES[rule]
    first, *_ = found(rule, deployment(**example.fails))
    said = f"{first.what} {first.fix}"
    assert not [word for word in example.says if word not in said], said
    assert first.severity == (example.severity or RULES[rule].severity)
    assert first.why and first.source and first.fix


def test_nothing_speaks_against_the_good_deployment():
    assert [finding for rule in RULES for finding in found(rule, deployment())] == []


@pytest.mark.parametrize("rule", RULES)
def test_rules_bear_with_a_file_that_says_nothing(rule):
    changes = dict.fromkeys(CONFIG, GONE)
    found(rule, deployment(changes, target_source={"shape": None}, draft_source={"shape": None}))


@pytest.mark.parametrize("rule", RULES)
def test_rules_bear_with_values_of_the_wrong_kind(rule):
    for wrong in ("eight", -1, None, [], {}):
        found(rule, deployment(dict.fromkeys(CONFIG, wrong)))
        found(rule, deployment({f"{SPEC}.{key}": wrong for key in CONFIG[SPEC]}))


def test_a_finding_has_the_line_of_its_key(tmp_path):
    document = write(tmp_path, change(CONFIG, {"max_num_tokens": 100}))
    [finding] = found("DF012", deployment({"max_num_tokens": 100}, document=document))
    assert document.file.read_text().splitlines()[finding.line - 1] == "max_num_tokens: 100"


def test_a_key_that_is_missing_has_the_line_of_its_section(tmp_path):
    changes = {f"{SPEC}.max_draft_len": GONE}
    document = write(tmp_path, change(CONFIG, changes))
    [finding] = found("DF004", deployment(changes, document=document))
    assert document.file.read_text().splitlines()[finding.line - 1] == "speculative_config:"


@pytest.mark.parametrize(
    ("rule", "fails", "severity", "words"),
    [
        ("DF002", config(spec__decoding_type="Eagle3"), "error", "Eagle3"),
        ("DF002", config(spec__decoding_type="Eagle3") | {"draft_is": {"target_layer_ids": None}}, "warning", "Eagle3"),
        ("DF002", config(spec__decoding_type=GONE), "error", "missing"),
        ("DF004", config(spec__max_draft_len=0), "error", "is 0"),
        ("DF008", {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "warning", "CUDA_LAUNCH_BLOCKING"),
        ("DF010", {"draft_is": {"variant": "DSpark"}, **config(spec__max_draft_len=11)}, "error", "10 or less"),
        ("DF011", {"draft_is": {"variant": "DSpark"}}, "warning", "write 10"),
        ("DF012", {"config": {"max_batch_size": GONE, "max_num_tokens": GONE}}, "error", "8192 (the default)"),
        ("DF014", config(spec__mask_token_id=-1), "error", "the file's mask_token_id is -1"),
        ("DF015", config(spec__target_layer_ids=[1, 9]), "error", "`fc` takes 5 layers"),
        ("DF015", config(spec__target_layer_ids=[1, 9, 17, 25, 34]), "warning", "overrule"),
        ("DF025", config(kv_cache_config__free_gpu_memory_fraction=1.5), "error", "1.5"),
        ("DF025", config(kv_cache_config__free_gpu_memory_fraction=0.1), "warning", "unused"),
        ("DF032", {"draft_is": {"causal": (True,) * 8}}, "warning", "8 full-attention layers"),
        ("DF035", config(attn_backend="VANILLA"), "warning", "VANILLA"),
        ("DF038", {"draft_is": {"heads": 64, "kv_heads": 1}}, "error", "64 for 1"),
        ("DF038", {"draft_is": {"heads": 36, "kv_heads": 8}}, "error", "36 for 8"),
        (
            "DF041",
            {
                "target_source": {
                    "precision": "nvfp4",
                    "tensors": frozenset({"model.layers.0.mlp.experts.gate_up_proj"}),
                }
            },
            "error",
            "gate_up_proj_weight_scale",
        ),
        ("DF042", config(moe_config__backend="TRITON", moe_expert_parallel_size=8), "warning", "Hopper"),
        ("DF042", {"gpus": "H200x8"}, "error", "SM90"),
        ("DF042", {"gpus": "H200x8", **config(moe_config__backend="TRITON")}, "error", "write CUTLASS"),
        ("DF043", {"gpus": "H200x8", **config(kv_cache_config__dtype="nvfp4")}, "error", "nvfp4"),
        ("DF050", {"target": "moonshotai/Kimi-K2.6", "draft": "z-lab/Kimi-K2.6-DFlash"}, "error", "Kimi"),
        ("DF050", {"target_is": {"architecture": "Qwen3MoeForCausalLM", "model_type": "qwen3_moe"}}, "warning", "MoE"),
        ("DF050", {"target_is": {"architecture": "OtherForCausalLM", "model_type": "other"}}, "warning", "nothing"),
        ("DF050", {"target": "Qwen/Qwen3.6-27B"}, "note", "Qwen3.6"),
        ("DF051", config(spec__decoding_type="DSpark"), "error", "no heads"),
        ("DF051", {"draft_is": {"variant": "Domino"}}, "error", "Domino"),
        ("DF051", {"draft_is": {"variant": "the speculators format"}}, "error", "speculators"),
        ("DF051", {"draft_is": {"variant": "an anchor slot that drafts"}}, "error", "DSpark"),
        ("DF051", {"draft_is": {"variant": "DFlash2"}, "release": "1.3.0rc20"}, "warning", "1.3.0rc27"),
        ("DF054", {"draft_is": {"draft_vocab": 32000}}, "error", "32000"),
        ("DF054", {"draft_source": {"tensors": frozenset({"d2t"})}}, "error", "d2t"),
        ("DF056", {"trained_on": "thinking"}, "note", "thoughts"),
        ("DF061", {"gpus": "B300x6", "config": {"tensor_parallel_size": 6}}, "error", "attention heads"),
        ("DF062", {"target": "Qwen/Qwen3-8B", **config(moe_expert_parallel_size=2)}, "warning", "no experts"),
        ("DF062", {"target_is": {"experts": 6}, **config(moe_expert_parallel_size=4)}, "error", "6 experts"),
        ("DF062", config(moe_expert_parallel_size=2, moe_tensor_parallel_size=2), "error", "is not 8"),
        ("DF063", {"config": {"tensor_parallel_size": 4}}, "warning", "4 of the 8"),
        ("DF066", {"gpus": "RTX PRO 6000 x8"}, "note", "PCIe"),
        ("DF077", config(spec__draft_len_schedule={1: 4}), "error", "max_draft_len is 9"),
        ("DF077", config(spec__draft_len_schedule={1: 9, 2: 12}), "error", "drafts 12"),
        ("DF077", config(spec__draft_len_schedule={0: 9}), "error", "0: 9"),
        ("DF078", config(spec__max_concurrency=4), "warning", "max_concurrency 4"),
        ("DF079", config(cuda_graph_config=None), "warning", "null"),
        ("DF079", config(cuda_graph_config={"batch_sizes": [1, 2, 4, 8, 16]}), "warning", "enable_padding"),
    ],
)
def test_other_ways_to_fail(rule, fails, severity, words):
    said = [one.severity for one in found(rule, deployment(**fails)) if words in f"{one.what} {one.fix}"]
    assert said and {*said} == {severity}


def test_the_tail_is_only_recommended_where_the_release_has_it():
    changes = {"kv_cache_config.enable_block_reuse": True}
    [older] = found("DF071", deployment(changes, release="1.3.0rc27"))
    [newer] = found("DF071", deployment(changes, release="1.4.0rc1"))
    assert ("context_recompute_tail" in older.fix, "context_recompute_tail" in newer.fix) == (False, True)


def test_reuse_is_on_unless_the_file_says_otherwise():
    [finding] = found("DF071", deployment({"kv_cache_config": GONE}))
    assert "on by default" in finding.what


def test_before_windows_came_no_sliding_layer_is_said_to_run_causal():
    judged = {"draft_is": {"kinds": ("sliding",) * 8, "causal": (False,) * 8, "window": 2048}, "config": VANILLA}
    assert found("DF032", deployment(**judged, release="1.3.0rc20")) == []
    assert found("DF033", deployment(**judged, release="1.3.0rc20")) != []


def test_an_fp8_cache_makes_the_arena_of_the_trtllm_backend_count():
    large = {"max_batch_size": 900, "max_seq_len": 131072, "max_num_tokens": 131072}
    assert found("DF020", deployment(large)) == []
    assert found("DF020", deployment({**large, "kv_cache_config.dtype": "fp8"})) != []


def test_attention_data_parallelism_splits_no_heads_of_the_arena():
    sizes = {"max_batch_size": 64, "max_seq_len": 131072, "max_num_tokens": 131072, **VANILLA}
    split = found("DF020", deployment({**sizes, "max_batch_size": 512}))
    whole = found("DF020", deployment({**sizes, "max_batch_size": 512, "enable_attention_dp": True}))
    assert split == [] and "8 KV heads" in whole[0].what


def test_skipping_the_estimate_leaves_the_arena_what_the_cache_did_not_take():
    sizes = {"max_batch_size": 64, "max_seq_len": 131072, "max_num_tokens": 131072, **VANILLA}
    judged = deployment(sizes, environment={"TRTLLM_SKIP_KV_CACHE_ESTIMATION": "1"})
    assert found("DF020", deployment(sizes)) == [] == found("DF020", judged)  # 17 GB of 46
    tight = {**sizes, "kv_cache_config.free_gpu_memory_fraction": 0.95}
    [finding] = found("DF020", deployment(tight, environment={"TRTLLM_SKIP_KV_CACHE_ESTIMATION": "1"}))
    assert "lower free_gpu_memory_fraction" in finding.fix
