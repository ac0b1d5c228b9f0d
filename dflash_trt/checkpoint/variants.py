"""Relatives of DFlash that need other graphs: recognised by a key, a tensor or a file, and refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.errors import UserError

SUPPORTED = "supported: drafters in the z-lab layout, with the target's embedding and head"

ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURES = {
    "DFlash2*": "DFlash2",
    "*DSpark*": "DSpark",
    "*Domino*": "Domino",
    "*Laguna*": "Laguna",
    "*Speculator*": "the speculators format",
    "*": f"only {ARCHITECTURE} is read",
}
MODEL_TYPES = ("qwen3", "gpt_oss", "llama")

# A key counts if its value is neither null, false, zero nor empty.
KEYS = {
    "speculators_model_type": "the speculators format",
    "speculators_config": "the speculators format",
    "transformer_layer_config": "the speculators format",
    "conv_kernel_size": "DFlash2",
    "selector_rank": "DFlash2",
    "markov_rank": "DSpark",
    "dspark_markov_rank": "DSpark",
    "dspark_bonus_anchor": "DSpark",
    "enable_confidence_head": "DSpark",
    "projector_type": "Domino",
    "sample_from_anchor": "an anchor slot that drafts",
    "shift_label": "an anchor slot that drafts",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "has_embed_tokens": "an embedding of its own",
    "has_lm_head": "an output head of its own",
}

TENSORS = {
    "*embed_tokens*": "an embedding of its own",
    "*lm_head*": "an output head of its own",
    "d2t": "a reduced draft vocabulary",
    "t2d": "a reduced draft vocabulary",
    "mask_embedding*": "a mask embedding of its own",
    "*sink*": "attention sinks",
    "*_conv.*": "DFlash2",
    "candidate_selector*": "DFlash2",
    "*markov*": "DSpark",
    "*confidence*": "DSpark",
    "prefix_gru*": "Domino",
    "embed_proj*": "Domino",
    "*.g_proj.*": "Laguna",
    "*qkv_proj*": "Laguna",
    "aux_hidden_norms*": "Laguna",
}

FILES = {"mask_embedding.pt": "a mask embedding of its own"}


def refuse_variant_config(config: Config) -> None:
    """`config` is the joined view of top level and `dflash_config`."""
    for architecture in config.texts("architectures", ()):
        if architecture != ARCHITECTURE:
            reason = next(ARCHITECTURES[pattern] for pattern in ARCHITECTURES if fnmatch(architecture, pattern))
            raise _refusal(f"architecture {architecture}", reason, config.file)
    for key in KEYS:
        if config.values.get(key):
            raise _refusal(f"{key} {config.values[key]!r}", KEYS[key], config.file)
    if not config.flag("is_neox_style", True):
        raise _refusal("is_neox_style false", "rotation of neighbouring dimensions", config.file)
    config.one_of("model_type", MODEL_TYPES, None)
    vocab = config.integer("vocab_size", at_least=1)
    if (draft_vocab := config.integer("draft_vocab_size", vocab)) != vocab:
        raise _refusal(f"draft_vocab_size {draft_vocab} of vocab_size {vocab}", TENSORS["d2t"], config.file)
    hidden = config.integer("hidden_size", at_least=1)
    if (features := config.integer("target_hidden_size", hidden)) != hidden:
        raise _refusal(f"target_hidden_size {features} beside hidden_size {hidden}", "wider features", config.file)
    for name, reason in FILES.items():
        if (config.file.parent / name).exists():
            raise _refusal(name, reason, config.file.parent)


def refuse_variant_tensors(tensors: Mapping[str, TensorRef]) -> None:
    for name, ref in sorted(tensors.items()):
        for pattern, reason in TENSORS.items():
            if fnmatch(name, pattern):
                raise _refusal(f"tensor {name}", reason, ref.file)


def _refusal(what: str, reason: str, where: Path) -> UserError:
    return UserError(f"{what} ({reason}) is not supported", where=where, fix=SUPPORTED)
