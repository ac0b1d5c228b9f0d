"""The drafter as a torch module, for calibration: one pass takes a text's features and many anchors at once.

    context = hidden_norm(fc(features))                    [T, H], shared by all anchors and layers
    block of an anchor at position p = [token p, MASK …]   sees context rows before p, and its own rows

The modules have the checkpoint's names, so that what ModelOpt finds in them goes by the file's names. What a row sees
is what the engine's rows see (`graph/visibility.py`, z-lab's `_attention_mask`).
"""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

from dflash_trt.checkpoint import Draft, DraftConfig
from dflash_trt.graph.rope import inverse_frequencies


def load_draft_model(draft: Draft, device: str | torch.device = "cpu") -> DraftModel:
    """The drafter with the weights of its checkpoint, in the widest of their dtypes so that none is rounded."""
    tensors = {}
    for file in sorted({ref.file for ref in draft.tensors.values()}):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for name, ref in draft.tensors.items():
                if ref.file == file:
                    tensors[name] = opened.get_tensor(ref.name)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    with torch.device("meta"):
        model = DraftModel(draft.config)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False)


class DraftModel(nn.Module):
    """`fc`, `hidden_norm`, `layers.N`, `norm`; embedding and head are the target's."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RmsNorm(config.hidden, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RmsNorm(config.hidden, config.rms_eps)

    def forward(self, features: torch.Tensor, anchors: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Hidden states [A, K, H] of the blocks.

        `features` [T, taps * H_target]: tapped target states at positions 0 … T-1. `anchors` [A]: position of each
        block's first token, at most T. `block` [A, K, H]: the target's embeddings of the blocks' tokens.
        """
        config = self.config
        context = self.hidden_norm(self.fc(features))
        x = block.flatten(0, 1) * config.embedding_scale  # [A*K, H]
        rows = Rows(config, len(features), anchors, block.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, context, rows)
        return self.norm(x).view_as(block)


class Rows:
    """Where the rows of a pass stand: T context rows, then the K rows of each anchor."""

    def __init__(self, config: DraftConfig, context: int, anchors: torch.Tensor, width: int, dtype: torch.dtype):
        device = anchors.device
        past = torch.arange(context, device=device)
        own = (anchors[:, None] + torch.arange(width, device=device)).flatten()  # [A*K]
        self._query = own[:, None]
        self._key = torch.cat([past, own])[None]
        first = anchors.repeat_interleave(width)[:, None]
        block = torch.arange(len(anchors), device=device).repeat_interleave(width)
        self._visible = torch.cat([past[None] < first, block[:, None] == block[None]], dim=1)  # [A*K, T + A*K]

        frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
        angles = self._key[0, :, None].float() * torch.from_numpy(frequencies).to(device)
        angles = torch.cat([angles, angles], dim=-1)  # [T + A*K, D]
        self.cos, self.sin = ((f(angles) * factor).to(dtype) for f in (torch.cos, torch.sin))

    def mask(self, *, causal: bool, window: int | None) -> torch.Tensor:
        """What the block rows of a layer see, bool [A*K, T + A*K]."""
        visible = self._visible
        if causal:
            visible = visible & (self._key <= self._query)
        if window is not None:
            visible = visible & ((self._query - self._key).abs() < window)
        return visible


class Layer(nn.Module):
    """A pre-norm decoder layer whose keys and values are those of the context and of the block."""

    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.rms_eps)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor, context: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Grouped-query attention of block rows to context and block; k_proj and v_proj run on both."""

    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.head_dim, self.causal, self.window = config.head_dim, config.causal[index], config.windows[index]
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden, kv, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden, kv, bias=config.attention_bias)
        self.o_proj = nn.Linear(q, config.hidden, bias=config.attention_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RmsNorm(config.head_dim, config.rms_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, context: torch.Tensor, rows: Rows) -> torch.Tensor:
        q = self.q_norm(self._heads(self.q_proj(x)))
        k = self.k_norm(self._heads(torch.cat([self.k_proj(context), self.k_proj(x)])))
        v = self._heads(torch.cat([self.v_proj(context), self.v_proj(x)]))
        past = len(context)
        q = _rotate(q, rows.cos[past:], rows.sin[past:])
        k = _rotate(k, rows.cos, rows.sin)
        mask = rows.mask(causal=self.causal, window=self.window)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, rows, D]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y[0].transpose(0, 1).flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [rows, heads, D]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RmsNorm(nn.Module):
    """Normed in float32, then rounded, then scaled, as the Qwen3 and Llama families do."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation of x [rows, heads, D] by cos, sin [rows, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
