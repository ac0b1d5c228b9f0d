"""NVFP4 weights among a checkpoint's tensors, in the unified Hugging Face layout of NVIDIA ModelOpt.

    X.weight           U8 [out, in/2]        two e2m1 codes a byte, the first in the low half
    X.weight_scale     F8_E4M3 [out, in/16]  one scale a block of 16 inputs
    X.weight_scale_2   F32 []                one scale for all of X
    X.input_scale      F32 []                one scale for X's activations; absent: they stay unquantized (W4A16)

Experts in one tensor (`experts.py`) are X itself, U8 [E, in/2, out], and X_weight_scale, F8_E4M3 [E, in/16, out]: laid
out as in the model, each byte with two inputs of one output. X_weight_scale_2 and X_input_scale are those of all.

Which weights are packed is for the tensors to say. Configs that say otherwise are refused (`declared.py`), for one of
the two is of another revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.declared import Declared, read_declared
from dflash_trt.checkpoint.experts import BLOCKS, is_fused
from dflash_trt.checkpoint.model import Quantization, TensorRef
from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.checkpoint.weights import load_tensor
from dflash_trt.errors import UserError

Shapes = dict[str, tuple[int, ...]]

PACKED, BLOCK_SCALES, SCALAR = "U8", "F8_E4M3", "F32"
PARTS = {"weight": PACKED, "weight_scale": BLOCK_SCALES, "weight_scale_2": SCALAR, "input_scale": SCALAR}
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
SUPPORTED = "supported: NVFP4 as ModelOpt writes it; make it from the unquantized checkpoint with `dflash-trt quantize`"

# Tensor names that tell of other formats, which nobody here reads.
FORMATS = {
    "*.weight_packed": "compressed-tensors",
    "*.weight_global_scale": "compressed-tensors",
    "*.input_global_scale": "compressed-tensors",
    "*.weight_zero_point": "compressed-tensors",
    "*.qweight": "GPTQ or AWQ",
    "*.qzeros": "GPTQ or AWQ",
    "*.scales": "GPTQ or AWQ",
    "*.g_idx": "GPTQ",
    "*.weight_scale_inv": "FP8 in blocks",
    "*.weight.absmax": "bitsandbytes",
    "*.weight.quant_map": "bitsandbytes",
    "*.weight.quant_state.*": "bitsandbytes",
    "*_blocks": "MXFP4",
    "*.pre_quant_scale": "AWQ: scaled activations",
    "*.k_bias": "an affine KV cache",
    "*.v_bias": "an affine KV cache",
}
UNPACKED = ("embed_tokens.weight", ".router.weight")
CACHE_SCALES = (".k_scale", ".v_scale")  # of a quantized KV cache; ours stays in the engine's dtype


def read_quantization(
    config: Config, tensors: dict[str, TensorRef], shapes: Shapes
) -> tuple[dict[str, TensorRef], Shapes, Quantization | None]:
    """(tensors, shapes, what is packed) of a checkpoint whose unquantized tensors would have `shapes`.

    The shapes returned are those of the packed form where a weight is packed. MXFP4 experts are read where `shapes`
    name their blocks; `experts.py` has checked them. Scales of a quantized KV cache are taken out of the tensors and
    noted. Raises UserError for other packed formats, for scales that are missing, damaged or of another shape or dtype,
    and for configs that contradict the tensors.
    """
    notes = []
    if cache := [name for name in tensors if name.endswith(CACHE_SCALES)]:
        notes.append(f"{len(cache)} scales for a quantized KV cache are not used: caches stay unquantized")
        tensors = {name: ref for name, ref in tensors.items() if name not in cache}
    _refuse_formats(tensors, shapes)
    declared = read_declared(config, mxfp4=any(name.endswith(BLOCKS) for name in shapes))
    modules = [name.removesuffix(".weight") for name, shape in shapes.items() if _can_be_packed(name, shape)]
    packed = {
        module: part_name(module, "input_scale") in tensors
        for module in modules
        if (ref := tensors.get(part_name(module, "weight"))) and ref.dtype == PACKED
    }
    shapes = dict(shapes)
    for module in packed:
        weight = part_name(module, "weight")
        shapes |= _packed_shapes(module, shapes[weight], tensors[weight])
        for part in ("weight_scale", "weight_scale_2"):
            if (scale := part_name(module, part)) not in tensors:
                ref = tensors[weight]
                fix = "the export is incomplete; make it again"
                raise _bad(ref, f"has dtype {ref.dtype}, but {scale} is missing", fix)
    for name, ref in tensors.items():
        module, part = _split(name)
        if part in SCALES:
            _check_scale(ref, part, module in packed, tensors.get(part_name(module, "weight")))
            if ref.shape == (1,) and part != "weight_scale":
                shapes[name] = (1,)
            elif part == "input_scale":
                shapes[name] = ()
    weights = {module: tensors.get(part_name(module, "weight")) for module in modules}
    spelled = {module: ref.name.removesuffix(".weight") for module, ref in weights.items() if ref}
    for record in declared:
        _check_mxfp4(record, tensors)
        record.check(spelled, packed)
    for module, activations in packed.items():
        for part in ("weight_scale_2", "input_scale") if activations else ("weight_scale_2",):
            name = part_name(module, part)
            _check_value(tensors[name], shapes[name])
    notes += [note for record in declared for note in record.notes]
    return tensors, shapes, _describe(packed, tensors, notes) if packed or notes else None


def _describe(packed: Mapping[str, bool], tensors: Mapping[str, TensorRef], notes: list[str]) -> Quantization:
    parts = [tensors.get(part_name(module, part)) for module in packed for part in PARTS]
    return Quantization(
        packed=packed,
        values=sum(2 * tensors[part_name(module, "weight")].nbytes for module in packed),
        nbytes=sum(ref.nbytes for ref in parts if ref),
        notes=tuple(dict.fromkeys(notes)),
    )


def packed_dtypes(quantization: Quantization | None) -> dict[str, tuple[str, ...]]:
    """Name → allowed dtypes of the tensors that are not plain floats."""
    modules = quantization.packed if quantization else {}
    return {part_name(module, part): (dtype,) for module in modules for part, dtype in PARTS.items()}


def part_name(module: str, part: str) -> str:
    """The key of one of the `PARTS` of a module."""
    if is_fused(module):
        return module if part == "weight" else f"{module}_{part}"
    return f"{module}.{part}"


def _split(name: str) -> tuple[str, str]:
    """(module, part) of a scale; for other tensors the part means nothing."""
    for part in SCALES:
        if is_fused(module := name.removesuffix(f"_{part}")) and module != name:
            return module, part
    module, _, part = name.rpartition(".")
    return module, part


def _can_be_packed(name: str, shape: tuple[int, ...]) -> bool:
    """An embedding is read row by row, and a router's few bits decide much: neither has a 4-bit form here."""
    if is_fused(name):
        return True
    return name.endswith(".weight") and len(shape) == 2 and not name.endswith(UNPACKED)


def _refuse_formats(tensors: Mapping[str, TensorRef], shapes: Shapes) -> None:
    for name, ref in sorted(tensors.items()):
        for pattern, format in FORMATS.items():
            if fnmatch(name, pattern) and name not in shapes:
                raise UserError(f"tensor {ref.name} ({format}) is not supported", where=ref.file, fix=SUPPORTED)
        if ref.dtype.startswith("F8_") and name.endswith(".weight"):
            raise UserError(f"{ref.name} is FP8 ({ref.dtype}), not supported", where=ref.file, fix=SUPPORTED)


def _packed_shapes(module: str, shape: tuple[int, ...], weight: TensorRef) -> Shapes:
    axis = 1  # of the inputs, in experts [E, in, out] as in linears [out, in]
    columns = shape[axis]
    if columns % BLOCK:
        raise _bad(weight, f"is packed, but its {columns} inputs are not a multiple of {BLOCK}", SUPPORTED)
    return {
        part_name(module, "weight"): (*shape[:axis], columns // 2, *shape[axis + 1 :]),
        part_name(module, "weight_scale"): (*shape[:axis], columns // BLOCK, *shape[axis + 1 :]),
        part_name(module, "weight_scale_2"): (),
    }


def _check_mxfp4(record: Declared, tensors: Mapping[str, TensorRef]) -> None:
    """MXFP4 experts in a checkpoint that ModelOpt has written are excluded there."""
    for name, ref in sorted(tensors.items()):
        if name.endswith(BLOCKS):
            spelled = ref.name.removesuffix(BLOCKS)
            if algo := record.algo_of(name.removesuffix(BLOCKS), spelled):
                fix = "config and weights are of different revisions; quantize again, or download again"
                raise record.config.bad("quant_algo", f"is {algo} for {spelled}, but {ref.name} is MXFP4", fix)


def _check_scale(ref: TensorRef, part: str, packed: bool, weight: TensorRef | None) -> None:
    if not packed:
        if weight is None:
            raise _bad(ref, "is there, but there is no weight of that name", "the export is incomplete; make it again")
        if weight.dtype == PACKED:
            raise _bad(weight, "is packed, which is read of linears alone", SUPPORTED)
        raise _bad(ref, f"is there, but {weight.name} is {weight.dtype}, not packed NVFP4 ({PACKED})", SUPPORTED)
    if ref.dtype != PARTS[part]:
        raise _bad(ref, f"has dtype {ref.dtype}, not {PARTS[part]}", "write the scales as ModelOpt does")
    if part != "weight_scale" and ref.shape not in ((), (1,)):
        raise _bad(ref, f"has shape {list(ref.shape)}, not that of a single number", SUPPORTED)


def _check_value(ref: TensorRef, shape: tuple[int, ...]) -> None:
    if ref.shape != shape:
        return  # for `check_tensors` to complain about
    value = float(load_tensor(ref).reshape(()))
    if not 0 < value < float("inf"):
        raise _bad(
            ref, f"is {value:g}, not a positive number", "the exporter divided by zero or overflowed; quantize again"
        )


def _bad(ref: TensorRef, what: str, fix: str) -> UserError:
    return UserError(f"{ref.name} {what}", where=ref.file, fix=fix)
