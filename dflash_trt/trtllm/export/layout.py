"""TensorRT-LLM's names of a network's tensors, and what of a checkpoint each is made of.

    transformer.layers.N.attention.qkv     q_proj, k_proj and v_proj of a rank, one below the other
    transformer.layers.N.attention.dense   o_proj
    transformer.layers.N.mlp.fc            gate_proj, whose output goes through SiLU
    transformer.layers.N.mlp.gate          up_proj
    transformer.layers.N.mlp.proj          down_proj

Names and cuts are those of `layers/attention.py`, `layers/mlp.py`, `layers/linear.py` and `layers/embedding.py` in
TensorRT-LLM 1.2; `models/model_weights_loader.py` there has the same table from the other side. The drafter's own parts
(`fc`, `hidden_norm`) are named by our model class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dflash_trt.checkpoint import Draft, StackConfig, Target, TensorRef
from dflash_trt.trtllm.export.share import WHOLE, Share

TRANSFORMER = "transformer"
EMBEDDING = f"{TRANSFORMER}.vocab_embedding"
HEAD = "lm_head"
FC = f"{TRANSFORMER}.fc"
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_layernorm",
         "self_attn.q_norm": "attention.q_layernorm", "self_attn.k_norm": "attention.k_layernorm"}  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A linear of the checkpoint, and how it is cut."""

    module: str  # its key without `.weight`
    share: Share


@dataclass(frozen=True)
class Linear:
    """A linear of the network: one of the checkpoint, or several that are joined along their outputs."""

    name: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Vector:
    """A norm's weight or an embedding: a tensor that is never quantized."""

    name: str
    ref: TensorRef
    share: Share


Part = Linear | Vector


def target_layout(target: Target, tp: int) -> list[Part]:
    """Everything the target's network consists of."""
    return [
        *_ends(target.tensors, target, tp),
        *_stack(target.config, target.tensors, "model.", tp),
        Vector(f"{TRANSFORMER}.ln_f.weight", target.tensors["model.norm.weight"], WHOLE),
    ]


def draft_layout(draft: Draft, target: Target, tp: int) -> list[Part]:
    """The drafter's network. Embedding and head are copies of the target's: an engine cannot borrow another's."""
    return [
        *_ends(target.tensors, target, tp),
        Linear(FC, (Member("fc", WHOLE),)),
        Vector(f"{TRANSFORMER}.hidden_norm.weight", draft.tensors["hidden_norm.weight"], WHOLE),
        *_stack(draft.config, draft.tensors, "", tp),
        Vector(f"{TRANSFORMER}.ln_f.weight", draft.tensors["norm.weight"], WHOLE),
    ]


def _ends(tensors: Mapping[str, TensorRef], target: Target, tp: int) -> Iterator[Part]:
    """Both are cut by vocabulary and padded to equal parts. A tied head is written as well, for its cut is its own."""
    embedding = tensors["model.embed_tokens.weight"]
    yield Vector(f"{EMBEDDING}.weight", embedding, Share("rows", tp))
    if target.config.tie_embeddings:
        yield Vector(f"{HEAD}.weight", embedding, Share("rows", tp))
    else:
        yield Linear(HEAD, (Member("lm_head", Share("rows", tp)),))


def _stack(config: StackConfig, tensors: Mapping[str, TensorRef], prefix: str, tp: int) -> Iterator[Part]:
    rows, columns, kv_rows = Share("rows", tp), Share("columns", tp), Share("rows", min(tp, config.kv_heads))
    for i in range(config.layers):
        own, name = f"{prefix}layers.{i}", f"{TRANSFORMER}.layers.{i}"
        for ours, theirs in NORMS.items():
            if ref := tensors.get(f"{own}.{ours}.weight"):
                yield Vector(f"{name}.{theirs}.weight", ref, WHOLE)
        q, k, v = (f"{own}.self_attn.{letter}_proj" for letter in "qkv")
        yield Linear(f"{name}.attention.qkv", (Member(q, rows), Member(k, kv_rows), Member(v, kv_rows)))
        yield Linear(f"{name}.attention.dense", (Member(f"{own}.self_attn.o_proj", columns),))
        yield Linear(f"{name}.mlp.fc", (Member(f"{own}.mlp.gate_proj", rows),))
        yield Linear(f"{name}.mlp.gate", (Member(f"{own}.mlp.up_proj", rows),))
        yield Linear(f"{name}.mlp.proj", (Member(f"{own}.mlp.down_proj", columns),))
