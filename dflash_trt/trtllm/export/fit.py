"""What TensorRT-LLM's engine backend cannot hold, said before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dflash_trt.checkpoint import Draft, Pair, Rope, Target, TensorRef
from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.errors import UserError
from dflash_trt.trtllm.export.config import ARCHITECTURES
from dflash_trt.trtllm.export.content import is_packed
from dflash_trt.trtllm.export.layout import Linear, Part
from dflash_trt.trtllm.export.scales import read_input_scale

LANES = "serve it with TensorRT-LLM 1.3 (`dflash-trt recipe`), or compile it here (`dflash-trt convert`, `build`)"
WINDOWS = "TensorRT-LLM's engines take windows when they run, for all layers alike"


def check_pair(models: Pair, tp: int) -> None:
    """Raises UserError naming the first thing that does not fit."""
    assert models.draft
    _check_target(models.target)
    for half in (models.target, models.draft):
        _check_rope(half.config.rope, half)
        _check_weight_only(half)
    if tp < 1:
        raise UserError(f"{tp} is too small", where="--tp", fix="give 1 or more")
    if what := _unsplit(models, tp):
        fitting = [str(n) for n in range(1, models.target.config.heads + 1) if not _unsplit(models, n)]
        fix = f"choose --tp {', '.join(fitting)}" if fitting else LANES
        raise UserError(f"{what} cannot be split over {tp} ranks", where="--tp", fix=fix)


def check_inputs(parts: Sequence[Part], tensors: Mapping[str, TensorRef], packed: Mapping[str, bool]) -> None:
    """gate and up read one input: kernels that fuse the norm before them quantize it once."""
    linears = {part.name: part for part in parts if isinstance(part, Linear)}
    for name, gate in linears.items():
        if name.endswith(".mlp.fc"):
            both = [gate, linears[name.removesuffix("fc") + "gate"]]
            modules = [linear.members[0].module for linear in both if is_packed(linear, packed)]
            if len(modules) == len(both):
                read_input_scale(tensors, modules)


def _check_target(target: Target) -> None:
    config, where = target.config, target.path
    if config.model_type not in ARCHITECTURES or config.experts:
        what = f"{config.model_type} was never supported by TensorRT-LLM's engine backend"
        raise UserError(what, where=where, fix=LANES)
    if any(window is not None for window in config.windows):
        raise UserError(f"layers with sliding windows are not exported: {WINDOWS}", where=where, fix=LANES)
    if config.model_type == "qwen3" and config.attention_bias:
        what = "attention_bias of Qwen3 includes o_proj, for which TensorRT-LLM's Qwen has no bias"
        raise UserError(what, where=where, fix=LANES)


def _check_rope(rope: Rope, half: Target | Draft) -> None:
    """Its YaRN rounds the correction range, and its scale of cos and sin follows from the factor."""
    if rope.kind == "yarn":
        for key, bad in (
            ("truncate false", not rope.truncate),
            ("attention_factor", rope.attention_factor is not None),
        ):
            if bad:
                what = f"YaRN with {key} is not what TensorRT-LLM 1.2 computes"
                raise UserError(what, where=half.path, fix=LANES)


def _check_weight_only(half: Target | Draft) -> None:
    for module, activations in (half.quantization.packed if half.quantization else {}).items():
        if not activations:
            what = f"{module} is NVFP4 without an input_scale; TensorRT-LLM's FP4 linears quantize their input, too"
            fix = "quantize with --preset nvfp4 or nvfp4-mlp, or export the unquantized checkpoint"
            raise UserError(what, where=half.path, fix=fix)


def _unsplit(models: Pair, tp: int) -> str | None:
    """What tp ranks cannot share evenly."""
    return next((what for half in (models.target, models.draft) if half for what in _uneven(half, tp)), None)


def _uneven(half: Target | Draft, tp: int) -> Iterator[str]:
    config, whose = half.config, "drafter" if isinstance(half, Draft) else "target"
    if config.heads % tp:
        yield f"{config.heads} attention heads of the {whose}"
    elif config.kv_heads % tp and tp % config.kv_heads:
        yield f"{config.kv_heads} key/value heads of the {whose}"
    elif config.ffn % tp:
        yield f"the {whose}'s MLP of width {config.ffn}"
    elif isinstance(half, Target) and config.qk_norm and 1 < config.heads // tp == max(1, config.kv_heads // tp):
        # `Attention.forward` takes q, k and v apart head by head there, in an order no checkpoint has.
        yield f"{config.heads} heads with as many keys and a norm over them, which TensorRT-LLM 1.2 would mix up,"
    packed = half.quantization.packed if half.quantization else {}
    widths = {"o_proj": config.heads * config.head_dim, "down_proj": config.ffn}
    for module in packed:
        width = widths.get(module.rpartition(".")[2])
        if width and width % (tp * BLOCK):
            yield f"{module}'s {width} NVFP4 inputs, in blocks of {BLOCK},"
