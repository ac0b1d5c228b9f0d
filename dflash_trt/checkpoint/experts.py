"""The tensors of a mixture of experts, as gpt-oss has them: all experts of a layer in one tensor.

Below `layers.N.mlp.`, with E experts, H hidden_size and I the width of one expert:

    router.weight [E, H], router.bias [E]
    experts.gate_up_proj [E, H, 2I], experts.down_proj [E, I, H]     floats, or the codes of NVFP4 (`quantized.py`)
    experts.*_proj_blocks U8 [E, out, in/32, 16]                     MXFP4 instead: two e2m1 codes a byte
    experts.*_proj_scales U8 [E, out, in/32]                         a power of two (e8m0) for each 32 inputs
    experts.gate_up_proj_bias [E, 2I], experts.down_proj_bias [E, H]

How the weights are stored is for the tensors to say, and one model stores all of them in one way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.declared import FLAT_KEY, MXFP4
from dflash_trt.checkpoint.model import Experts, StackConfig, Storage, TensorRef
from dflash_trt.checkpoint.mxfp4 import BLOCK
from dflash_trt.checkpoint.stack import Shapes
from dflash_trt.errors import UserError

INSIDE = ".mlp.experts."
PROJECTIONS = ("gate_up_proj", "down_proj")
BLOCKS, SCALES = "_blocks", "_scales"
BYTES = "U8"  # the dtype of both
COUNT_KEYS = ("num_local_experts", "num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token")  # transformers' name and the publisher's


def is_fused(module: str) -> bool:
    """All experts of a layer in one tensor?"""
    return module.rpartition(INSIDE)[2] in PROJECTIONS and INSIDE in module


def is_mxfp4_scale(name: str) -> bool:
    return INSIDE in name and name.endswith(SCALES)


def read_experts(config: Config, tensors: Mapping[str, TensorRef]) -> Experts:
    """What the config says of the experts, and how the tensors store them.

    Raises UserError where keys disagree, where layers are stored in different ways, or where the config names MXFP4
    and the tensors are something else.
    """
    (count_key, count), (top_k_key, top_k) = (_read_either(config, keys) for keys in (COUNT_KEYS, TOP_K_KEYS))
    if top_k > count:
        raise config.bad(top_k_key, f"is {top_k}, but {count_key} is {count}")
    return Experts(
        count,
        top_k,
        _read_storage(config, tensors),
        alpha=config.number("swiglu_alpha", Experts.alpha),
        limit=config.number("swiglu_limit", Experts.limit),
    )


def _read_either(config: Config, keys: Sequence[str]) -> tuple[str, int]:
    """A number that has two names, and the name it was found under."""
    said = {key: config.integer(key, at_least=1) for key in keys if key in config}
    if not said:
        raise config.bad(keys[0], "is missing")
    if len({*said.values()}) > 1:
        first, second = (f"{key} is {value}" for key, value in said.items())
        raise UserError(f"{first}, but {second}", where=config.file, fix="keep one")
    return next(iter(said.items()))


def expert_shapes(experts: Experts, hidden: int, ffn: int) -> Shapes:
    """Name → shape of what stands in a layer for its MLP; of NVFP4 experts the shapes of their floats, [E, in, out]."""
    count = experts.count
    shapes: Shapes = {"mlp.router.weight": (count, hidden), "mlp.router.bias": (count,)}
    for name, (width, rows) in {"gate_up_proj": (hidden, 2 * ffn), "down_proj": (ffn, hidden)}.items():
        name = f"mlp.experts.{name}"
        shapes[f"{name}_bias"] = (count, rows)
        if experts.storage == MXFP4:
            shapes[f"{name}{BLOCKS}"] = (count, rows, width // BLOCK, BLOCK // 2)
            shapes[f"{name}{SCALES}"] = (count, rows, width // BLOCK)
        else:
            shapes[name] = (count, width, rows)
    return shapes


def mxfp4_dtypes(experts: Experts, stack: StackConfig, tensors: Mapping[str, TensorRef]) -> dict[str, tuple[str, ...]]:
    """Name → allowed dtypes of MXFP4's tensors. Raises UserError for those that are not what MXFP4 has."""
    if experts.storage != MXFP4:
        return {}
    names = {"gate_up_proj": ("hidden_size", stack.hidden), "down_proj": ("intermediate_size", stack.ffn)}
    found: dict[str, tuple[str, ...]] = {}
    for name, ref in sorted(tensors.items()):
        if INSIDE not in name or not name.endswith((BLOCKS, SCALES)):
            continue
        found[name] = (BYTES,)
        fix = "the checkpoint is damaged or of another revision; download it again"
        key, width = names.get(name.rpartition(".")[2].rpartition("_")[0], ("", 0))
        if width % BLOCK:
            fix = "MXFP4 has one scale for 32 inputs; take the checkpoint with BF16 experts"
            raise _bad(ref, f"is MXFP4, but its {width} inputs ({key}) are not a multiple of {BLOCK}", fix)
        if ref.dtype != BYTES:
            raise _bad(ref, f"has dtype {ref.dtype}, MXFP4 has {BYTES}", fix)
        kind, other = (BLOCKS, SCALES) if name.endswith(BLOCKS) else (SCALES, BLOCKS)
        partner = name.removesuffix(kind) + other
        if partner not in tensors:
            raise _bad(ref, f"is there, but {partner} is missing", "one has no values without the other; " + fix)
    return found


def check_input_scales(tensors: Mapping[str, TensorRef]) -> None:
    """Raises UserError for NVFP4 layers that round the inputs of one product alone."""
    for name, ref in sorted(tensors.items()):
        module, scale, _ = name.partition("_proj_input_scale")
        if INSIDE in name and scale:
            prefix, _, local = module.rpartition(".")
            other = f"{prefix}.{'down' if local == 'gate_up' else 'gate_up'}{scale}"
            if other not in tensors:
                fix = "a layer's experts round the inputs of both products or of neither; quantize again"
                raise _bad(ref, f"is there, but {other} is missing", fix)


def count_values(tensors: Mapping[str, TensorRef]) -> int:
    """Weights, the codes of MXFP4 blocks and the values of all other tensors; the blocks' scales do not count."""
    total = 0
    for name, ref in tensors.items():
        if INSIDE in name and name.endswith((BLOCKS, SCALES)):
            total += 2 * ref.nbytes if name.endswith(BLOCKS) else 0
        else:
            total += math.prod(ref.shape)
    return total


def _read_storage(config: Config, tensors: Mapping[str, TensorRef]) -> Storage:
    kinds: dict[Storage, TensorRef] = {}
    for name, ref in sorted(tensors.items()):
        local = name.rpartition(INSIDE)[2]
        if INSIDE in name and local.removesuffix(BLOCKS) in PROJECTIONS:
            kind: Storage = "mxfp4" if local.endswith(BLOCKS) else "nvfp4" if ref.dtype == BYTES else "float"
            kinds.setdefault(kind, ref)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        what = f"{second.name} is {_spelled(other, second)}, but {first.name} is {_spelled(one, first)}"
        raise UserError(what, where=second.file, fix="all experts of a model must be stored in one way")
    for storage, ref in kinds.items():
        if storage != MXFP4 and config.section(FLAT_KEY).values.get("quant_method") == MXFP4:
            what = f"is {MXFP4}, but {ref.name} is {_spelled(storage, ref)}"
            fix = f"remove {FLAT_KEY} if the experts were unpacked, or download again"
            raise config.bad(f"{FLAT_KEY}.quant_method", what, fix)
        return storage
    return "float"  # there are none, which `check_tensors` will say


def _spelled(storage: Storage, ref: TensorRef) -> str:
    return ref.dtype if storage == "float" else f"{storage.upper()} ({ref.dtype})"


def _bad(ref: TensorRef, what: str, fix: str) -> UserError:
    return UserError(f"{ref.name} {list(ref.shape)} {what}", where=ref.file, fix=fix)
