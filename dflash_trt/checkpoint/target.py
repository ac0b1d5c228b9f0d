"""Read a target. A new family is one line of `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.config import Config, read_config
from dflash_trt.checkpoint.experts import check_input_scales, expert_shapes, mxfp4_dtypes, read_experts
from dflash_trt.checkpoint.model import Target, TargetConfig
from dflash_trt.checkpoint.quantized import packed_dtypes, read_quantization
from dflash_trt.checkpoint.stack import check_tensors, read_bias, read_layers, read_stack, read_windows, stack_shapes
from dflash_trt.checkpoint.weights import read_tensors, rename_tensors


@dataclass(frozen=True)
class Family:
    """How a `model_type` differs from the others."""

    qk_norm: bool
    windows: Literal["none", "qwen", "alternating"]  # how sliding_window and layer_types are read
    default_theta: float | None = None  # where old configs leave rope_theta out
    default_rope: Mapping[str, Any] = field(default_factory=dict)  # of configs without a rope block
    default_eps: float = 1e-6
    o_bias: bool = True  # attention_bias includes o_proj
    experts: bool = False  # a mixture of them in place of every MLP
    sinks: bool = False


FAMILIES = {
    "llama": Family(qk_norm=False, windows="none", default_theta=10000.0),
    "qwen3": Family(qk_norm=True, windows="qwen"),
    "gpt_oss": Family(
        qk_norm=False,
        windows="alternating",
        default_theta=150000.0,
        default_rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        default_eps=1e-5,
        experts=True,
        sinks=True,
    ),
}


def read_target(path: Path) -> Target:
    """Read and check a target; no weight is loaded. `tensors` is keyed with the prefix `model.`, as transformers does.

    Raises UserError for anything missing, contradictory, damaged or unsupported.
    """
    path = Path(path)
    config = read_config(path)
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise config.bad("model_type", f"{model_type} is not supported yet", f"supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    tensors = rename_tensors(read_tensors(path), _prefixed)
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # in old Llama files; it follows from the config

    stack = read_stack(
        config,
        attention_bias=read_bias(config, "attention_bias", tensors, "self_attn"),
        qk_norm=family.qk_norm,
        windows=_read_windows(config, family),
        default_theta=family.default_theta,
        default_rope=family.default_rope,
        default_eps=family.default_eps,
    )
    experts = read_experts(config, tensors) if family.experts else None
    dtypes = mxfp4_dtypes(experts, stack, tensors) if experts else {}
    # transformers ties nothing when the file holds a head of its own, so the tensors have the last word.
    tied = config.flag("tie_word_embeddings", False) and "lm_head.weight" not in tensors
    mlp_bias = read_bias(config, "mlp_bias", tensors, "mlp")
    mlp = expert_shapes(experts, stack.hidden, stack.ffn) if experts else None
    own = stack_shapes(stack, o_bias=family.o_bias, mlp_bias=mlp_bias, mlp=mlp, sinks=family.sinks)
    shapes = {f"model.{name}": shape for name, shape in own.items()}
    shapes["model.embed_tokens.weight"] = (stack.vocab, stack.hidden)
    if not tied:
        shapes["lm_head.weight"] = (stack.vocab, stack.hidden)
    tensors, shapes, quantization = read_quantization(config, tensors, shapes)
    check_tensors(tensors, shapes, config, packed_dtypes(quantization) | dtypes)
    check_input_scales(tensors)
    return Target(
        path,
        TargetConfig(
            **vars(stack),
            model_type=model_type,
            tie_embeddings=tied,
            o_bias=stack.attention_bias and family.o_bias,
            mlp_bias=mlp_bias,
            bos_id=config.integer("bos_token_id", None),
            eos_ids=_read_eos(config),
            experts=experts,
            sinks=family.sinks,
        ),
        tensors,
        quantization,
    )


def _read_windows(config: Config, family: Family) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * read_layers(config)
    return read_windows(config, alternating=family.windows == "alternating")


def _prefixed(name: str) -> str:
    """The spelling of a whole model; files of the bare decoder lack the prefix."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _read_eos(config: Config) -> tuple[int, ...]:
    """`generation_config.json` knows best: chat models stop at more tokens there."""
    generation = config.file.with_name("generation_config.json")
    sources = [read_config(generation.parent, generation.name), config] if generation.exists() else [config]
    for source in sources:
        if "eos_token_id" in source:
            single = type(source.values["eos_token_id"]) is int
            return (source.integer("eos_token_id"),) if single else source.integers("eos_token_id")
    return ()
