"""Sizes of any published model, from its config.json alone: what memory, speed and compatibility are reckoned from.

`target.py` and `draft.py` read the few families an engine is made of, with their weights, and refuse the rest. Here
every family counts whose config names its sizes as Hugging Face does; a key that no size hangs on is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config import Config, read_config, read_json
from dflash_trt.checkpoint.variants import ARCHITECTURES, KEYS
from dflash_trt.checkpoint.weights import read_tensors

FULL, SLIDING, LINEAR = "full", "sliding", "linear"
PACKED = "U8"
TEXT = ("text_config", "transformer_layer_config", "llm_config")  # where the decoder of a larger model is described
VARIANTS = {"DFlash2", "DSpark", "Domino", "Laguna", "the speculators format", "an anchor slot that drafts"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    file: Path
    architecture: str | None
    model_type: str
    layers: int
    hidden: int
    ffn: int  # of a dense MLP
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int | None
    tied: bool  # the head is the embedding
    max_position: int | None
    kinds: tuple[str, ...]  # per layer "full", "sliding" or "linear" (which keeps a state instead of keys and values)
    window: int | None  # tokens that a sliding layer sees
    cached: tuple[int, ...]  # per layer: numbers cached for a token, keys and values together
    latent: bool  # MLA: a compressed vector is cached, the same on every rank
    experts: int  # of a layer with experts; 0: all layers are dense
    experts_per_token: int
    expert_ffn: int
    shared_ffn: int  # of experts that see every token
    dense_layers: int  # layers without experts in a model that has them
    attention_bias: bool
    quantization: str | None  # "nvfp4", "mxfp4", "fp8", … as the config says; None: floats


@dataclass(frozen=True)
class DrafterShape(Shape):
    """Sizes of a DFlash drafter, and the keys that are its own."""

    block_size: int | None
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...] | None  # in the order of the config
    num_target_layers: int | None
    draft_vocab: int | None  # rows of a head of its own
    causal: tuple[bool, ...]  # per layer: inside the block
    variant: str | None  # a relative of DFlash, by the name people know
    packed_qkv: bool  # q, k or v in four bits


def read_shape(source: Path | Mapping[str, Any], file: Path | None = None) -> Shape:
    """Of a target: a directory with config.json, or the config's values and the file to name in errors.

    Raises UserError for a size that is missing or no number.
    """
    return Shape(**_sizes(_open(source, file)))


def read_drafter_shape(source: Path | Mapping[str, Any], file: Path | None = None) -> DrafterShape:
    """Of a drafter, in any of the formats that carry `target_layer_ids` or `aux_hidden_state_layer_ids`.

    Whether q, k and v are packed is for the tensors to say where `source` is a directory with weights. Raises UserError
    as `read_shape`.
    """
    config = _open(source, file).joined("dflash_config")
    sizes = _sizes(config)
    kinds, window = sizes["kinds"], sizes["window"]
    causal = tuple(kind == SLIDING for kind in kinds)
    if config.flag("use_swa", False):
        window = config.integer("swa_window_size", window, at_least=0)
        kinds, causal = (SLIDING,) * len(kinds), (False,) * len(kinds)
    said = config.flag("is_causal", config.flag("causal", None))
    sizes |= {"kinds": kinds, "window": window}
    ids = config.integers("target_layer_ids", None)
    if ids is None and "aux_hidden_state_layer_ids" in config:  # the speculators format counts the embedding as 0
        ids = tuple(i - 1 for i in config.integers("aux_hidden_state_layer_ids"))
    return DrafterShape(
        **sizes,
        block_size=config.integer("block_size", None),
        mask_token_id=config.integer("mask_token_id", None),
        target_layer_ids=ids,
        num_target_layers=config.integer("num_target_layers", None),
        draft_vocab=config.integer("draft_vocab_size", None),
        causal=causal if said is None else (said,) * len(kinds),
        variant=_variant(config),
        packed_qkv=_packs_qkv(config, source if isinstance(source, Path) else None),
    )


def _open(source: Path | Mapping[str, Any], file: Path | None) -> Config:
    if isinstance(source, Path):
        return read_config(source)
    return Config(file or Path("config.json"), dict(source))


def _sizes(config: Config) -> dict[str, Any]:
    """The fields of `Shape`."""
    inner = next((config.section(key) for key in TEXT if key in config), None)
    text = Config(config.file, config.values | inner.values) if inner else config
    layers = text.integer("num_hidden_layers", at_least=1)
    hidden = text.integer("hidden_size", at_least=1)
    heads = text.integer("num_attention_heads", at_least=1)
    kv_heads = text.integer("num_key_value_heads", heads, at_least=1)
    head_dim = text.integer("head_dim", hidden // heads, at_least=1)
    kinds = _kinds(text, layers)
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_ffn = text.integer("moe_intermediate_size", text.integer("intermediate_size", 0)) if experts else 0
    return {
        "file": config.file,
        "architecture": next(iter(config.texts("architectures", ())), None),
        "model_type": config.text("model_type", text.text("model_type", "unknown")),
        "layers": layers,
        "hidden": hidden,
        "ffn": text.integer("intermediate_size", 0),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": text.integer("vocab_size", None, at_least=1),
        "tied": text.flag("tie_word_embeddings", False),
        "max_position": text.integer("max_position_embeddings", None, at_least=1),
        "kinds": kinds,
        "window": text.integer("sliding_window", None) if SLIDING in kinds else None,
        "cached": _cached(text, kinds, kv_heads, head_dim),
        "latent": "kv_lora_rank" in text,
        "experts": experts,
        "experts_per_token": _first(text, "num_experts_per_tok", "experts_per_token", default=0),
        "expert_ffn": expert_ffn,
        "shared_ffn": text.integer("shared_expert_intermediate_size", text.integer("n_shared_experts", 0) * expert_ffn),
        "dense_layers": text.integer("first_k_dense_replace", 0) if experts else 0,
        "attention_bias": text.flag("attention_bias", False),
        "quantization": _quantization(config, text),
    }


def _kinds(text: Config, layers: int) -> tuple[str, ...]:
    """Per layer. `layer_types` has the last word; without it, older keys."""
    if "layer_types" in text:
        names = text.texts("layer_types")
        if len(names) != layers:
            raise text.bad("layer_types", f"names {len(names)} layers, but num_hidden_layers is {layers}")
        return tuple(next((kind for kind in (SLIDING, LINEAR) if kind in name), FULL) for name in names)
    if interval := text.integer("full_attention_interval", 0):
        return tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers))
    if text.text("model_type", "") == "gpt_oss" and "sliding_window" in text:
        return tuple(SLIDING if layer % 2 == 0 else FULL for layer in range(layers))
    if "sliding_window" in text and text.flag("use_sliding_window", True):
        first = text.integer("max_window_layers", 0)
        return tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    return (FULL,) * layers


def _cached(text: Config, kinds: tuple[str, ...], kv_heads: int, head_dim: int) -> tuple[int, ...]:
    if "kv_lora_rank" in text:
        return (text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim", 0),) * len(kinds)
    wide = text.integer("num_global_key_value_heads", kv_heads) * text.integer("global_head_dim", head_dim)
    values = {LINEAR: 0, SLIDING: 2 * kv_heads * head_dim, FULL: 2 * wide}
    return tuple(values[kind] for kind in kinds)


def _first(config: Config, *keys: str, default: int) -> int:
    """The first of the keys that is there."""
    key = next((key for key in keys if key in config), keys[0])
    return config.integer(key, default)


def _quantization(config: Config, text: Config) -> str | None:
    """hf_quant_config.json, which TensorRT-LLM lets win, or `quantization_config`."""
    beside = config.file.with_name("hf_quant_config.json")
    if beside.exists():
        values = read_json(beside)
        said = Config(beside, values).section("quantization").text("quant_algo", None)
        return said.lower() if said else None
    section = config.section("quantization_config").values or text.section("quantization_config").values
    said = section.get("quant_algo") or section.get("quant_method")
    return str(said).lower() if said else None


def _variant(config: Config) -> str | None:
    for architecture in config.texts("architectures", ()):
        for pattern, name in ARCHITECTURES.items():
            if fnmatch(architecture, pattern) and name in VARIANTS:
                return name
    if config.values.get("projector_type") == "dspark":
        return "DSpark"
    return next((KEYS[key] for key in KEYS if config.values.get(key) and KEYS[key] in VARIANTS), None)


def _packs_qkv(config: Config, directory: Path | None) -> bool:
    if directory is not None and any(directory.glob("*.safetensors")):
        tensors = read_tensors(directory)
        ends = tuple(f".self_attn.{name}_proj.weight" for name in ("q", "k", "v", "qkv"))
        return any(ref.dtype == PACKED for name, ref in tensors.items() if name.endswith(ends))
    section = config.section("quantization_config").values
    if not section:
        return False
    excluded = [*(section.get("ignore") or ()), *(section.get("exclude_modules") or ())]
    return not any("self_attn" in str(name) or "qkv" in str(name) for name in excluded)
