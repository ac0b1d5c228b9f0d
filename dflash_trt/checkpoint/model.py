"""What a checkpoint says about its network, as data.

Configs are parsed once (`draft.py`, `target.py`) into these frozen records; every later room reads only them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TensorRef:
    """Where one tensor lies on disk; no byte of it has been read."""

    name: str  # as the file spells it
    file: Path
    offset: int  # absolute, in bytes from the start of `file`
    nbytes: int
    dtype: str  # safetensors spelling: F32, BF16, F16, U8, F8_E4M3, ...
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters, half-split (neox) rotation over the whole head."""

    theta: float
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # yarn, llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float | None = None  # yarn: explicit scale of cos and sin
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3


@dataclass(frozen=True)
class StackConfig:
    """A pre-norm decoder stack: grouped-query attention and a SwiGLU MLP in every layer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rms_eps: float
    rope: Rope
    max_position: int
    attention_bias: bool  # q, k, v and o carry biases (in targets o by TargetConfig.o_bias)
    qk_norm: bool  # RMSNorm over head_dim on q and k before the rotation
    windows: tuple[int | None, ...]  # per layer: a key is visible if its distance < window; None: no limit


Storage = Literal["float", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of every MLP, as gpt-oss has it; `ffn` is the width of one expert.

    Of an expert's gate and up rows the even ones are gate, the odd ones up. The gate is cut off above `limit`, up on
    both sides; an expert computes (up + 1) * gate * sigmoid(alpha * gate).
    """

    count: int
    top_k: int
    storage: Storage  # of the experts' weights in the checkpoint
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class TargetConfig(StackConfig):
    """The model whose text is served."""

    model_type: str
    tie_embeddings: bool
    o_bias: bool  # Qwen-like stacks bias q, k, v only
    mlp_bias: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    experts: Experts | None = None
    sinks: bool = False  # one more logit in each softmax, learned per head


@dataclass(frozen=True)
class DraftConfig(StackConfig):
    """The block-diffusion drafter (arXiv 2602.06036), z-lab layout."""

    block_size: int  # K: the anchor token and K-1 drafts
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based layer outputs of the target, in the order `fc` was trained on
    num_target_layers: int | None
    causal: tuple[bool, ...]  # per layer: is attention inside the block causal
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True)
class Quantization:
    """Which weights are NVFP4. `packed`: module (a tensor's key without `.weight`) → are its activations NVFP4 too."""

    packed: Mapping[str, bool]
    values: int  # weights in all of them
    nbytes: int  # their codes and scales
    notes: tuple[str, ...] = ()  # what the checkpoint asks for and does not get

    @property
    def algo(self) -> str | None:
        """As ModelOpt spells it; None if no weight is packed."""
        kinds = tuple(set(self.packed.values()))
        names: dict[tuple[bool, ...], str | None] = {(): None, (True,): "NVFP4", (False,): "W4A16_NVFP4"}
        return names.get(kinds, "MIXED_PRECISION")


@dataclass(frozen=True)
class Target:
    """A checked target checkpoint. `tensors` is keyed as in transformers: `model.…`, `lm_head.weight` unless tied."""

    path: Path
    config: TargetConfig
    tensors: dict[str, TensorRef]
    quantization: Quantization | None = None


@dataclass(frozen=True)
class Draft:
    """A checked drafter checkpoint. `tensors` is keyed without the `model.` prefix."""

    path: Path
    config: DraftConfig
    tensors: dict[str, TensorRef]
    quantization: Quantization | None = None


@dataclass(frozen=True)
class Pair:
    """A target and the drafter trained for it; `draft` is None for an autoregressive engine."""

    target: Target
    draft: Draft | None
