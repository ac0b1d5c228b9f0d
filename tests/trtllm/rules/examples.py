"""Of each rule: a deployment that it lets pass, one that it does not, and what it must say of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.trtllm.rules.build import GONE

SPEC = "speculative_config"
KV = "kv_cache_config"


def config(**changes: Any) -> dict[str, Any]:
    """`config(spec__max_draft_len=3)`: dots cannot stand in keywords."""
    return {"config": {key.replace("spec__", f"{SPEC}.").replace("__", "."): value for key, value in changes.items()}}


@dataclass(frozen=True)
class Example:
    fails: dict[str, Any]  # arguments of `deployment`
    says: tuple[str, ...]
    passes: dict[str, Any] = field(default_factory=dict)  # none: the good deployment itself
    severity: str | None = None  # if it differs from the rule's own


QWEN = {"target": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16"}
ALONE = {"tensor_parallel_size": 1, f"{SPEC}.max_draft_len": 7}
VANILLA = {f"{SPEC}.attention_backend": "VANILLA"}
ARENA = {**ALONE, **VANILLA, "max_batch_size": 64, "max_seq_len": 131072, "max_num_tokens": 131072}
LONG = {"layers": 6, "max_position": 262144, "kinds": ("full",) * 6, "causal": (False,) * 6}
SLIDES = {"kinds": ("sliding",) * 8, "window": 2048}
AHEAD = {**SLIDES, "causal": (False,) * 8}
MODELOPT = frozenset(
    f"model.layers.0.mlp.experts.gate_up_proj{end}" for end in ("", "_weight_scale", "_weight_scale_2", "_bias")
)

EXAMPLES: dict[str, Example] = {
    "DF001": Example({"config": {SPEC: GONE}}, ("speculative_config",)),
    "DF002": Example(config(spec__decoding_type="dflash"), ("decoding_type", "'dflash'", "DFlash")),
    "DF003": Example(config(spec__speculative_model=GONE) | {"draft_source": {"name": None}}, ("speculative_model",)),
    "DF004": Example(config(spec__max_draft_len=GONE), ("max_draft_len", "9")),
    "DF005": Example({"release": "1.2.1"}, ("1.2.1", "1.3.0rc14"), {"release": "1.3.0rc14"}),
    "DF006": Example(config(backend="_autodeploy"), ("backend _autodeploy",), config(backend="pytorch")),
    "DF007": Example(
        {"target_source": {"shape": None, "fault": "/no does not exist", "fix": "download it"}},
        ("/no does not exist", "download it"),
    ),
    "DF008": Example(
        {"environment": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "4"}},
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=4",),
        {"environment": {"TRTLLM_ENABLE_PDL": "1", "ENABLE_PERFECT_ROUTER": "0"}},
        severity="error",
    ),
    "DF010": Example(config(spec__max_draft_len=10), ("max_draft_len 10", "a block of 11", "10", "9 or less")),
    "DF011": Example(config(spec__max_draft_len=7), ("max_draft_len 7", "9 tokens", "block of 10", "write 9")),
    "DF012": Example(
        config(max_batch_size=32, max_num_tokens=256, spec__max_draft_len=15),
        ("max_num_tokens is 256", "32 x (1 + 15)", "512", "16 or less"),
        config(max_batch_size=32, max_num_tokens=512, spec__max_draft_len=15),
    ),
    "DF013": Example(
        {"draft_is": {"mask_token_id": None}},
        ("mask_token_id",),
        {"draft_is": {"mask_token_id": None}, **config(spec__mask_token_id=200000)},
    ),
    "DF014": Example(
        {"draft_is": {"mask_token_id": 201088}}, ("201088", "0 to 201087"), {"draft_is": {"mask_token_id": 201087}}
    ),
    "DF015": Example(config(spec__mask_token_id=7), ("mask_token_id 7", "200000"), config(spec__mask_token_id=200000)),
    "DF016": Example({"draft_is": {"target_layer_ids": (9, 1, 17, 25, 33)}}, ("9, 1, 17", "sorted")),
    "DF017": Example(
        {"draft_is": {"target_layer_ids": (1, 9, 17, 25, 36)}},
        ("hold 36", "0 to 35"),
        {"draft_is": {"target_layer_ids": (1, 9, 17, 25, 35)}},
    ),
    "DF018": Example({"draft_is": {"target_layer_ids": (1, 9, 9, 25, 33)}}, ("9 twice",)),
    "DF019": Example(
        {"draft_is": {"target_layer_ids": None}},
        ("target_layer_ids",),
        {"draft_is": {"target_layer_ids": None}, **config(spec__target_layer_ids=[1, 9, 17, 25, 33])},
    ),
    "DF020": Example(
        {"config": ARENA, "gpus": "B300", "draft_is": LONG, **QWEN},
        ("arena", "195 GiB", "209.4 GB", "max_seq_len", "max_batch_size of 40"),
        {"config": {**ARENA, "max_batch_size": 40}, "gpus": "B300", "draft_is": LONG, **QWEN},
    ),
    "DF021": Example(
        {"config": {**ARENA, f"{SPEC}.attention_backend": "TRTLLM"}, "gpus": "B300", "draft_is": LONG, **QWEN},
        ("arena", "max_batch_size of 40"),
        {
            "config": {**ARENA, f"{SPEC}.attention_backend": "TRTLLM", "max_batch_size": 40},
            "gpus": "B300",
            "draft_is": LONG,
            **QWEN,
        },
    ),
    "DF022": Example(config(max_seq_len=GONE), ("max_seq_len is not set", "131072")),
    "DF023": Example(
        {"draft_is": {"max_position": 16384}}, ("32768", "16384"), {"draft_is": {"max_position": 32768}}
    ),
    "DF024": Example(
        {"release": "1.3.0rc14"}, ("32768", "8192"), {"release": "1.3.0rc14", **config(max_seq_len=8192)}
    ),
    "DF025": Example(config(kv_cache_config__free_gpu_memory_fraction=0.98), ("0.98",)),
    "DF026": Example(config(kv_cache_config__max_tokens=4096), ("max_tokens 4096", "32768")),
    "DF027": Example(
        {"target": "moonshotai/Kimi-K2.6", "config": {"tensor_parallel_size": 1}}, ("weights", "B300"), severity=None
    ),
    "DF030": Example(
        {"gpus": "RTX PRO 6000 x8"},
        ("SM100", "SM120"),
        {"gpus": "RTX PRO 6000 x8", "config": VANILLA},
    ),
    "DF031": Example(
        {"draft_is": AHEAD},
        ("attention_backend TRTLLM", "sliding"),
        {"draft_is": {**SLIDES, "causal": (True,) * 8}},
    ),
    "DF032": Example(
        {"draft_is": AHEAD, "config": VANILLA},
        ("8 sliding", "causal"),
        {"draft_is": {**AHEAD, "variant": "DFlash2"}, "config": VANILLA},
    ),
    "DF033": Example(
        {"draft_is": {**SLIDES, "causal": (True,) * 8}, "release": "1.3.0rc20"},
        ("2048", "1.3.0rc27"),
        {"draft_is": {**SLIDES, "causal": (True,) * 8, "variant": "Laguna"}},
    ),
    "DF034": Example({"draft_is": {**SLIDES, "window": None}}, ("sliding", "missing"), {"draft_is": SLIDES}),
    "DF035": Example(config(attn_backend="FLASHINFER"), ("attn_backend FLASHINFER",), config(attn_backend="TRTLLM")),
    "DF036": Example(
        config(spec__attention_backend="FA4"),
        ("FA4", "SM90", "SM103", "TRTLLM"),
        {"gpus": "H200x8", **config(spec__attention_backend="FA4")},
    ),
    "DF037": Example(config(spec__attention_backend="VANILLA"), ("VANILLA", "B300")),
    "DF038": Example(
        {"draft_is": {"head_dim": 80}}, ("heads of 80", "VANILLA"), {"draft_is": {"head_dim": 80}, "config": VANILLA}
    ),
    "DF040": Example({"draft_is": {"packed_qkv": True, "quantization": "nvfp4"}}, ("NVFP4",)),
    "DF041": Example(
        {"target_source": {"precision": "nvfp4", "tensors": MODELOPT}},
        ("NVFP4 gpt-oss", "1.4.0rc1"),
        {"target_source": {"precision": "mxfp4"}},
    ),
    "DF042": Example(
        config(moe_config__backend="TRITON"),
        ("TRITON", "8 ranks", "write TRTLLM"),
        {"gpus": "H200x8", **config(moe_config__backend="TRITON", moe_expert_parallel_size=8)},
    ),
    "DF043": Example(
        {"gpus": "H200x8", "target_source": {"precision": "nvfp4"}},
        ("NVFP4", "SM90"),
        {"target_source": {"precision": "nvfp4"}},
    ),
    "DF044": Example(
        config(kv_cache_config__dtype="fp8"),
        ("fp8",),
        {"config": {f"{KV}.dtype": "fp8", **VANILLA}},
    ),
    "DF045": Example(
        {"target_source": {"precision": "nvfp4", "tensors": MODELOPT, "path": Path("/no"),
                           "name": "/no"}},
        ("/no", "hf_quant_config.json"),
        {"target_source": {"precision": "nvfp4"}},
    ),
    "DF046": Example(config(kv_cache_config__dtype="nvfp4"), ("nvfp4",), config(kv_cache_config__dtype="fp8")),
    "DF050": Example(
        {"target": "google/gemma-4-31B-it", "draft": "z-lab/gemma-4-31B-it-DFlash"}, ("Gemma",), severity="error"
    ),
    "DF051": Example(
        {"draft_is": {"variant": "DSpark"}},
        ("DSpark", "DFlash"),
        {"draft_is": {"variant": "DSpark"}, **config(spec__decoding_type="DSpark")},
    ),
    "DF052": Example({"draft_is": {"latent": True}}, ("MLA",)),
    "DF053": Example({"draft_is": {"hidden": 4096}}, ("2880", "4096")),
    "DF054": Example(
        {"draft_is": {"vocab": 151936}}, ("201088", "151936"), {"draft_is": {"draft_vocab": 201088}}
    ),
    "DF055": Example(
        {"target": "openai/gpt-oss-20b"}, ("36", "24"), {"target": "openai/gpt-oss-20b", "draft_is": {
            "num_target_layers": None}}
    ),
    "DF056": Example({"trained_on": "non-thinking"}, ("without thinking",), {"trained_on": "both"}),
    "DF057": Example({"draft_source": {"inferred": ("rope_theta",)}}, ("rope_theta", "drafter")),
    "DF058": Example({"target_source": {"shape": None, "name": None}}, ("target is not named", "--target")),
    "DF060": Example(config(tensor_parallel_size=4, pipeline_parallel_size=2), ("pipeline_parallel_size is 2",)),
    "DF061": Example(
        {"gpus": "B300x6", "config": {"tensor_parallel_size": 6}},
        ("attention heads", "64", "6"),
        {"gpus": "B300x4", "config": {"tensor_parallel_size": 4}},
    ),
    "DF062": Example(
        config(moe_expert_parallel_size=3),
        ("moe_expert_parallel_size 3",),
        config(moe_expert_parallel_size=4, moe_tensor_parallel_size=2),
    ),
    "DF063": Example({"gpus": "B300x4"}, ("8 ranks", "4 GPUs")),
    "DF064": Example(
        config(enable_attention_dp=True) | {"goal": "latency"},
        ("enable_attention_dp",),
        config(enable_attention_dp=True) | {"goal": "throughput"},
    ),
    "DF065": Example(
        config(tensor_parallel_size=4, context_parallel_size=2), ("context_parallel_size is 2",)
    ),
    "DF066": Example(
        {"gpus": "B300x4", "nodes": 2},
        ("spans nodes",),
        {"gpus": "B300x8", "nodes": 2},
    ),
    "DF070": Example(config(cache_transceiver_config={"backend": "NIXL"}), ("not transferred",)),
    "DF071": Example(
        config(kv_cache_config__enable_block_reuse=True),
        ("enable_block_reuse is on", "context_recompute_tail"),
        config(kv_cache_config__enable_block_reuse=True, spec__context_recompute_tail=512),
    ),
    "DF072": Example(
        config(spec__use_rejection_sampling=True, guided_decoding_backend="xgrammar"),
        ("xgrammar",),
        config(spec__use_rejection_sampling=True),
    ),
    "DF073": Example(config(max_beam_width=4), ("max_beam_width is 4",), config(max_beam_width=1)),
    "DF074": Example(config(sampler_type="TRTLLMSampler"), ("sampler_type",), config(sampler_type="auto")),
    "DF075": Example(config(batched_logits_processor="mine:Processor"), ("batched_logits_processor",)),
    "DF076": Example(config(enable_lora=True), ("enable_lora",), config(enable_lora=False)),
    "DF077": Example(
        config(spec__draft_len_schedule={1: 9, 8: 4}, spec__max_concurrency=8),
        ("max_concurrency",),
        config(spec__draft_len_schedule={1: 9, 8: 4}),
    ),
    "DF078": Example(
        config(spec__draft_len_schedule={1: 9, 8: 0}), ("0",), config(spec__draft_len_schedule={1: 9, 8: 1})
    ),
    "DF079": Example(
        config(cuda_graph_config={"enable_padding": True, "max_batch_size": 8}), ("batch 8", "16"),
    ),
    "DF080": Example(config(disable_overlap_scheduler=True), ("disable_overlap_scheduler",)),
    "DF081": Example(
        config(max_num_tokens=8192),
        ("8192", "32768"),
        config(max_num_tokens=8192, enable_chunked_prefill=True),
    ),
    "DF082": Example(config(spec__skip_ctx_buffer_budget_check=True), ("skip_ctx_buffer_budget_check",)),
    "DF083": Example(config(guided_decoding_backend="xgrammar"), ("xgrammar",)),
}  # fmt: skip
