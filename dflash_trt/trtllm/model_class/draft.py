"""The DFlash drafter (arXiv 2602.06036, section 4) in TensorRT-LLM's functional API. Never executed.

    trtllm-build --model_cls_file draft.py --model_cls_name DFlashDraftModel

Written against the public sources of TensorRT-LLM 1.2.1. One run of the engine drafts a block for each sequence:

    input_ids            int32 [B, K]        the last accepted token, then K-1 mask tokens
    position_ids         int32 [B, K]        of the block
    target_hidden        [B, T, taps * H]    the target's features of T tokens that were accepted since the last run
    context_position_ids int32 [B, T]        of these tokens; -1 in rows that pad a shorter sequence
    past_key_i, past_value_i  [B, Hkv, P, D] of earlier context, for each layer i
    past_position_ids    int32 [B, P]        -1 in rows that hold nothing
    →
    logits               float32 [B * (K-1), vocabulary]   of slots 1 … K-1; slot j drafts the token at its position
    present_key_i, present_value_i  [B, Hkv, T, D]          of the T tokens: the caller adds them to the past

Keys are stored normalized and rotated, so where a row lies in the past does not matter. Attention is made of matrix
products, not of the attention plugin: that takes keys of the tokens it runs on, and these come from the target. K is
`dflash_block_size` of config.json. B is at most --max_batch_size, T --max_input_len and P --max_seq_len.

Build with `--workers 1`, or under MPI: more workers are spawned processes, which cannot import this file's module.
"""

# mypy: ignore-errors
# (TensorRT-LLM is not where this is checked.)

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import tensorrt as trt
from tensorrt_llm._utils import pad_vocab_size, str_dtype_to_trt
from tensorrt_llm.functional import (
    RopeEmbeddingUtils,
    RotaryScalingType,
    Tensor,
    cast,
    concat,
    constant,
    cos,
    matmul,
    op_and,
    shape,
    sin,
    slice,
    softmax,
    split,
    tanh,
    unsqueeze,
    where,
)
from tensorrt_llm.layers import ColumnLinear, Embedding, GatedMLP, RmsNorm, RowLinear
from tensorrt_llm.models import MODEL_MAP
from tensorrt_llm.models.modeling_utils import PretrainedModel
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.plugin import current_all_reduce_helper

FAR = -1e30  # the logit of a key that is not visible


class Rotation:
    """cos and sin of positions [B, S], made once and shared by all layers; [B, 1, S, D/2]."""

    def __init__(self, config, positions):
        scaling, size = config.rotary_scaling or {"type": "none"}, config.head_size
        self.half = size // 2
        if scaling["type"] == "yarn":
            frequencies, table = RopeEmbeddingUtils.create_sinusoidal_positions_yarn(
                1, size, config.rotary_base, scaling["factor"], scaling["original_max_position_embeddings"],
                scaling["beta_fast"], scaling["beta_slow"], scaling.get("mscale", 1.0),
                scaling.get("mscale_all_dim", 0.0), False,
            )  # fmt: skip
        else:
            frequencies, table = RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin(
                1, size, config.rotary_base, scaling.get("factor", 1.0),
                RotaryScalingType.from_string(scaling["type"]), scaling,
            )  # fmt: skip
        factor = float(table[0, 0])  # of cos at position 0
        frequencies = constant(np.ascontiguousarray(frequencies, np.float32).reshape(1, 1, self.half))
        angles = unsqueeze(cast(positions, "float32"), 2) * frequencies
        self.cos, self.sin = (unsqueeze(cast(f(angles) * factor, config.dtype), 1) for f in (cos, sin))

    def __call__(self, x):
        """Rotate x [B, heads, S, D], whose halves belong together."""
        left, right = split(x, self.half, dim=3)
        return concat([left * self.cos - right * self.sin, right * self.cos + left * self.sin], dim=3)


class Attention(Module):
    """Of a block to the context and to itself."""

    def __init__(self, config, index):
        super().__init__()
        tp = config.mapping.tp_size
        self.heads = config.num_attention_heads // tp
        self.kv_heads = max(1, config.num_key_value_heads // tp)
        self.head_size, self.dtype = config.head_size, config.dtype
        self.window, self.causal = config.dflash_windows[index], config.dflash_causal[index]
        parallel = {"bias": config.attn_bias, "dtype": config.dtype, "tp_group": config.mapping.tp_group, "tp_size": tp}
        width = tp * (self.heads + 2 * self.kv_heads) * self.head_size
        self.qkv = ColumnLinear(config.hidden_size, width, gather_output=False, is_qkv=True, **parallel)
        self.dense = RowLinear(tp * self.heads * self.head_size, config.hidden_size, **parallel)
        self.q_layernorm = RmsNorm(self.head_size, eps=config.norm_epsilon, dtype=config.dtype)
        self.k_layernorm = RmsNorm(self.head_size, eps=config.norm_epsilon, dtype=config.dtype)

    def project(self, x, positions, rotation):
        """x [B*S, H] → q [B, Hq, S, D], k and v [B, Hkv, S, D], normalized and rotated."""
        counts = [self.heads, self.kv_heads, self.kv_heads]
        size = concat([shape(positions, 0), shape(positions, 1), sum(counts), self.head_size])
        q, k, v = split(self.qkv(x).view(size, zero_is_placeholder=False), counts, dim=2)
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k, v = (part.permute([0, 2, 1, 3]) for part in (q, k, v))
        return rotation(q), rotation(k), v

    def visible(self, rows, keys):
        """Positions [B, K] and [B, N] → bool [B, 1, 1, K or 1, N]."""
        rows, keys = unsqueeze(rows, 2), unsqueeze(keys, 1)
        seen = keys > -1
        if self.causal:
            seen = op_and(seen, keys < rows + 1)
        if self.window is not None:
            distance = rows - keys
            seen = op_and(seen, op_and(distance < self.window, distance > -self.window))
        return unsqueeze(unsqueeze(seen, 1), 1)

    def forward(self, x, rows, keys, rotation, context_k, context_v):
        """x [B*K, H], positions `rows` [B, K] and `keys` [B, N], the context's keys and values [B, Hkv, N-K, D]."""
        q, k, v = self.project(x, rows, rotation)
        k, v = concat([context_k, k], dim=2), concat([context_v, v], dim=2)
        batch, block, count, group = shape(rows, 0), shape(rows, 1), shape(keys, 1), self.heads // self.kv_heads
        stacked = concat([batch, self.kv_heads, block * group, self.head_size])
        scores = matmul(q.view(stacked, zero_is_placeholder=False), k, transb=True)  # [B, Hkv, G*K, N]
        apart = concat([batch, self.kv_heads, group, block, count])
        scores = cast(scores, "float32").view(apart, zero_is_placeholder=False) * self.head_size**-0.5
        weights = softmax(where(self.visible(rows, keys), scores, FAR), dim=4)
        together = concat([batch, self.kv_heads, block * group, count])
        out = matmul(cast(weights, self.dtype).view(together, zero_is_placeholder=False), v)
        heads = concat([batch, self.heads, block, self.head_size])
        out = out.view(heads, zero_is_placeholder=False).permute([0, 2, 1, 3])
        return self.dense(out.view([-1, self.heads * self.head_size]))


class Layer(Module):
    """Pre-norm, as Qwen3 has it."""

    def __init__(self, config, index):
        super().__init__()
        norm = {"eps": config.norm_epsilon, "dtype": config.dtype}
        self.input_layernorm = RmsNorm(config.hidden_size, **norm)
        self.attention = Attention(config, index)
        self.post_layernorm = RmsNorm(config.hidden_size, **norm)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, bias=False, dtype=config.dtype,
            tp_group=config.mapping.tp_group, tp_size=config.mapping.tp_size, quant_mode=config.quant_mode,
        )  # fmt: skip

    def forward(self, x, *attention):
        x = x + self.attention(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_layernorm(x))


class Transformer(Module):
    """The parameters but for the head's."""

    def __init__(self, config):
        super().__init__()
        taps, hidden = len(config.dflash_target_layer_ids), config.hidden_size
        norm = {"eps": config.norm_epsilon, "dtype": config.dtype}
        self.vocab_embedding = Embedding(config.vocab_size, hidden, dtype=config.dtype)
        self.fc = ColumnLinear(taps * hidden, hidden, bias=False, dtype=config.dtype)  # whole on every rank
        self.hidden_norm = RmsNorm(hidden, **norm)
        self.layers = ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.ln_f = RmsNorm(hidden, **norm)


class DFlashDraftModel(PretrainedModel):
    """The network."""

    def __init__(self, config):
        super().__init__(config)
        mapping = config.mapping
        self.transformer = Transformer(config)
        self.lm_head = ColumnLinear(
            config.hidden_size, pad_vocab_size(config.vocab_size, mapping.tp_size), bias=False, dtype=config.dtype,
            tp_group=mapping.tp_group, tp_size=mapping.tp_size, gather_output=True,
        )  # fmt: skip

    def forward(
        self, input_ids, position_ids, target_hidden, context_position_ids, past_position_ids, past_keys, past_values
    ):
        config, parts = self.config, self.transformer
        features = target_hidden.view([-1, len(config.dflash_target_layer_ids) * config.hidden_size])
        context = parts.hidden_norm(parts.fc(features))  # [B*T, H], the same for all layers
        x = parts.vocab_embedding(input_ids.view([-1]))  # [B*K, H]
        if config.dflash_embedding_scale != 1:
            x = x * config.dflash_embedding_scale
        keys = concat([past_position_ids, context_position_ids, position_ids], dim=1)
        of_context, of_block = (Rotation(config, positions) for positions in (context_position_ids, position_ids))
        for index, layer in enumerate(parts.layers):
            _, k, v = layer.attention.project(context, context_position_ids, of_context)
            k.mark_output(f"present_key_{index}", config.dtype)
            v.mark_output(f"present_value_{index}", config.dtype)
            k, v = concat([past_keys[index], k], dim=2), concat([past_values[index], v], dim=2)
            x = layer(x, position_ids, keys, of_block, k, v)
        logits = self._shape(self.lm_head(self._drafts(parts.ln_f(x))))
        logits.mark_output("logits", "float32")
        return logits

    def _drafts(self, x):
        """Slots 1 … K-1 of x [B*K, H]: the first holds a token that is known."""
        block, hidden = self.config.dflash_block_size, self.config.hidden_size
        x = x.view([-1, block, hidden])
        return slice(x, [0, 1, 0], concat([shape(x, 0), block - 1, hidden])).view([-1, hidden])

    def _shape(self, logits):
        """Without the padding of the vocabulary; multiplier and soft cap of drafters that were trained with them."""
        config = self.config
        logits = cast(slice(logits, [0, 0], concat([shape(logits, 0), config.vocab_size])), "float32")
        if config.dflash_logit_scale != 1:
            logits = logits * config.dflash_logit_scale
        cap = config.dflash_logit_softcap
        return tanh(logits * (1 / cap)) * cap if cap else logits

    def prepare_inputs(self, max_batch_size, max_input_len, max_seq_len, **others):
        """The network's inputs, by the names of `forward`; sizes are least, most likely and largest."""
        config, mapping = self.config, self.config.mapping
        if mapping.tp_size > 1:
            current_all_reduce_helper().set_workspace_tensor(mapping, 1)
        block, dtype = config.dflash_block_size, str_dtype_to_trt(config.dtype)
        batch = ("batch", [1, (max_batch_size + 1) // 2, max_batch_size])
        context = ("context", [1, min(block, max_input_len), max_input_len])
        past = ("past", [0, max_seq_len // 2, max_seq_len])
        features = ("features", len(config.dflash_target_layer_ids) * config.hidden_size)
        head = ("head_size", config.head_size)
        heads = ("kv_heads", max(1, config.num_key_value_heads // mapping.tp_size))

        def make(name, dtype, *dimensions):
            sizes = [size if isinstance(size, int) else -1 for _, size in dimensions]
            ranges = OrderedDict((name, [size]) for name, size in dimensions)
            return Tensor(name=name, dtype=dtype, shape=sizes, dim_range=ranges)

        layers = range(config.num_hidden_layers)
        return {
            "input_ids": make("input_ids", trt.int32, batch, ("block", block)),
            "position_ids": make("position_ids", trt.int32, batch, ("block", block)),
            "target_hidden": make("target_hidden", dtype, batch, context, features),
            "context_position_ids": make("context_position_ids", trt.int32, batch, context),
            "past_position_ids": make("past_position_ids", trt.int32, batch, past),
            "past_keys": [make(f"past_key_{i}", dtype, batch, heads, past, head) for i in layers],
            "past_values": [make(f"past_value_{i}", dtype, batch, heads, past, head) for i in layers],
        }


MODEL_MAP["DFlashDraftModel"] = DFlashDraftModel  # `trtllm-build` looks config.json's architecture up there
