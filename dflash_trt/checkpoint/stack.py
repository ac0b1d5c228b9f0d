"""What targets and drafters share: the decoder stack's fields, and the tensors it must consist of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.model import StackConfig, TensorRef
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.errors import UserError

Shapes = dict[str, tuple[int, ...]]
FLOATS = ("F32", "BF16", "F16")
FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 1000  # far beyond any model; a damaged config must not fill the memory


def read_stack(
    config: Config,
    *,
    attention_bias: bool,
    qk_norm: bool,
    windows: tuple[int | None, ...],
    default_theta: float | None = None,
    default_rope: Mapping[str, Any] = {},
    default_eps: float = 1e-6,
) -> StackConfig:
    hidden = config.integer("hidden_size", at_least=1)
    heads = config.integer("num_attention_heads", at_least=1)
    kv_heads = config.integer("num_key_value_heads", heads, at_least=1)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = config.integer("head_dim", hidden // heads, at_least=2)
    if head_dim % 2:
        raise config.bad("head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    config.one_of("hidden_act", ["silu"], "silu")
    max_position = config.integer("max_position_embeddings", at_least=1)
    return StackConfig(
        layers=read_layers(config),
        hidden=hidden,
        ffn=config.integer("intermediate_size", at_least=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.integer("vocab_size", at_least=1),
        rms_eps=config.number("rms_norm_eps", default_eps),
        rope=read_rope(config, max_position, default_theta, default_rope),
        max_position=max_position,
        attention_bias=attention_bias,
        qk_norm=qk_norm,
        windows=windows,
    )


def read_layers(config: Config) -> int:
    layers = config.integer("num_hidden_layers", at_least=1)
    if layers > MAX_LAYERS:
        raise config.bad("num_hidden_layers", f"is {layers}; more than {MAX_LAYERS} are not supported")
    return layers


def read_windows(config: Config, *, alternating: bool = False) -> tuple[int | None, ...]:
    """Per layer its sliding window, None for full attention (transformers' `Qwen3Config`).

    `alternating`: without `layer_types` every other layer slides, from the first on (`GptOssConfig`).
    """
    layers = read_layers(config)
    used, window = config.flag("use_sliding_window", None), config.integer("sliding_window", None, at_least=1)
    types = config.texts("layer_types", ((SLIDING, FULL) * layers)[:layers] if alternating else None)
    if types is None:
        first = config.integer("max_window_layers") if used and window else layers
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(types) != layers:
        raise config.bad("layer_types", f"names {len(types)} layers, num_hidden_layers is {layers}")
    if unknown := sorted({*types} - {FULL, SLIDING}):
        raise config.bad("layer_types", f"{unknown[0]!r} is not supported", f"supported: {FULL}, {SLIDING}")
    if SLIDING in types and window is None:
        raise config.bad("sliding_window", f"is missing, but layers are of the type {SLIDING}")
    if SLIDING in types and used is False:
        raise config.bad("use_sliding_window", f"is false, but layer_types names {SLIDING}", "make them agree")
    return tuple(window if kind == SLIDING else None for kind in types)


def read_bias(config: Config, key: str, tensors: Mapping[str, TensorRef], block: str) -> bool:
    """Do the projections of `block` carry biases? The tensors decide; a key that says otherwise is an error."""
    biases = [name for name in tensors if f".{block}." in name and name.endswith("_proj.bias")]
    said = config.flag(key, None)
    if said is not None and said != bool(biases):
        found = f"{biases[0]} is there" if biases else f"there are no {block} biases"
        raise config.bad(key, f"is {str(said).lower()}, but {found}", "config and weights are of different revisions")
    return bool(biases)


def stack_shapes(
    config: StackConfig, *, o_bias: bool, mlp_bias: bool = False, mlp: Shapes | None = None, sinks: bool = False
) -> Shapes:
    """Name → shape of every tensor of the layers and of the final norm, without prefix.

    `mlp` has what each layer holds in place of a dense MLP.
    """
    hidden, ffn, head_dim = config.hidden, config.ffn, config.head_dim
    q, kv = config.heads * head_dim, config.kv_heads * head_dim
    projections = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
    }
    if mlp is None:
        projections |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    biased = {name for name in projections if name.startswith("mlp") and mlp_bias}
    if config.attention_bias:
        biased |= {f"self_attn.{letter}_proj" for letter in ("qkvo" if o_bias else "qkv")}
    layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {f"{name}.weight": shape for name, shape in projections.items()}
    layer |= {f"{name}.bias": projections[name][:1] for name in biased}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if sinks:
        layer["self_attn.sinks"] = (config.heads,)
    layer |= mlp or {}
    numbered = {f"layers.{i}.{name}": shape for i in range(config.layers) for name, shape in layer.items()}
    return numbered | {"norm.weight": (hidden,)}


def check_tensors(
    tensors: Mapping[str, TensorRef], shapes: Shapes, config: Config, dtypes: Mapping[str, tuple[str, ...]] = {}
) -> None:
    """Exactly the expected tensors, each of the expected shape and of a float type or of those in `dtypes`."""
    directory = config.file.parent
    for name in sorted(tensors.keys() - shapes.keys()):
        raise UserError(
            f"tensor {name} is not supported",
            where=tensors[name].file,
            fix="nothing would read it; is this another format or another num_hidden_layers?",
        )
    if missing := sorted(shapes.keys() - tensors.keys()):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"missing tensor {', '.join(missing[:3])}{more}",
            where=directory,
            fix="download again; a misspelt name counts as missing",
        )
    for name, ref in tensors.items():
        if ref.shape != shapes[name]:
            says = "its weight's shape implies" if name.endswith("_scale") else "config.json says"
            raise UserError(
                f"{name} has shape {list(ref.shape)}, {says} {list(shapes[name])}",
                where=ref.file,
                fix="config and weights are of different revisions",
            )
        if ref.dtype not in (allowed := dtypes.get(name, FLOATS)):
            raise UserError(
                f"{name} has dtype {ref.dtype}, which is not supported here",
                where=ref.file,
                fix=f"supported: {', '.join(allowed)}",
            )
