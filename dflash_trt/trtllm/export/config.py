"""`config.json` of a TensorRT-LLM checkpoint: what `PretrainedConfig` and its two families read (1.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.checkpoint import Draft, Rope, StackConfig, Target
from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.trtllm.export.content import is_packed
from dflash_trt.trtllm.export.layout import HEAD, Linear, Part

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DRAFTER = "DFlashDraftModel"  # registered by our model class when `trtllm-build` loads it
TARGET_CLASSES = {"llama": "DFlashLlama", "qwen3": "DFlashQwen3"}

# What `QWenConfig` has no default for, though dense Qwen3 has no use for most of it.
QWEN3 = {"qwen_type": "qwen3", "seq_length": 8192, "use_logn_attn": False, "moe_intermediate_size": 0,
         "moe_shared_expert_intermediate_size": 0}  # fmt: skip


def target_config(target: Target, draft: Draft, *, dtype: str, tp: int) -> dict[str, Any]:
    config = target.config
    made = _network(config, ARCHITECTURES[config.model_type], dtype, tp)
    made |= {"attn_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "qk_layernorm": config.qk_norm}
    if config.model_type == "qwen3":
        made |= QWEN3
    made["dflash_target_layer_ids"] = list(draft.config.target_layer_ids)
    return made


def draft_config(draft: Draft, *, dtype: str, tp: int) -> dict[str, Any]:
    config = draft.config
    return _network(config, DRAFTER, dtype, tp) | {
        "attn_bias": config.attention_bias,
        "qk_layernorm": config.qk_norm,
        "dflash_block_size": config.block_size,
        "dflash_mask_token_id": config.mask_token_id,
        "dflash_target_layer_ids": list(config.target_layer_ids),
        "dflash_windows": list(config.windows),
        "dflash_causal": list(config.causal),
        "dflash_embedding_scale": config.embedding_scale,
        "dflash_logit_scale": config.logit_scale,
        "dflash_logit_softcap": config.logit_softcap,
    }


def _network(config: StackConfig, architecture: str, dtype: str, tp: int) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_size": config.head_dim,
        "hidden_act": "silu",
        "norm_epsilon": config.rms_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position,
        "rotary_base": config.rope.theta,
        "rotary_scaling": rotary_scaling(config.rope),
        "use_parallel_embedding": tp > 1,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
    }


def rotary_scaling(rope: Rope) -> dict[str, Any] | None:
    """As `RopeEmbeddingUtils` reads it. `fit.py` has refused what it cannot say."""
    made: dict[str, Any] = {"type": rope.kind, "factor": rope.factor}
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return made
    made["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        return made | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    made |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.mscale and rope.mscale_all_dim:  # transformers heeds them together only; the default is 1 and 0
        made |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    return made


def quantization_config(parts: Sequence[Part], packed: Mapping[str, bool]) -> dict[str, Any]:
    """What it does not exclude becomes an FP4 linear, so every other linear is named."""
    linears = [part for part in parts if isinstance(part, Linear)]
    four_bit = {linear.name for linear in linears if is_packed(linear, packed)}
    left = {linear.name for linear in linears} | {HEAD}  # a tied head is no linear here, but is one there
    if not four_bit:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    return {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": sorted(left - four_bit),
    }
