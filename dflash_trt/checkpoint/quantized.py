"""NVFP4 weights among a checkpoint's tensors, in the unified Hugging Face layout of NVIDIA ModelOpt.

    X.weight           U8 [out, in/2]        two e2m1 codes a byte, the first in the low half
    X.weight_scale     F8_E4M3 [out, in/16]  one scale a block of 16 inputs
    X.weight_scale_2   F32 []                one scale for all of X
    X.input_scale      F32 []                one scale for X's activations; absent: they stay unquantized (W4A16)

Which weights are packed is for the tensors to say. Configs that say otherwise are refused (`declared.py`), for one of
the two is of another revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.declared import read_declared
from dflash_trt.checkpoint.model import Quantization, TensorRef
from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.checkpoint.weights import load_tensor
from dflash_trt.errors import UserError

Shapes = dict[str, tuple[int, ...]]

PACKED, BLOCK_SCALES, SCALAR = "U8", "F8_E4M3", "F32"
PARTS = {"weight": PACKED, "weight_scale": BLOCK_SCALES, "weight_scale_2": SCALAR, "input_scale": SCALAR}
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
CACHE_SCALES = (".k_scale", ".v_scale")  # of a quantized KV cache; ours stays in the engine's dtype


def read_quantization(
    config: Config, tensors: dict[str, TensorRef], shapes: Shapes
) -> tuple[dict[str, TensorRef], Shapes, Quantization | None]:
    """(tensors, shapes, what is packed) of a checkpoint whose unquantized tensors would have `shapes`.

    The shapes returned are those of the packed form where a weight is packed. Scales of a quantized KV cache are taken
    out of the tensors and noted. Raises UserError for other packed formats, for scales that are missing, damaged or of
    another shape or dtype, and for configs that contradict the tensors.
    """
    notes = []
    if cache := [name for name in tensors if name.endswith(CACHE_SCALES)]:
        notes.append(f"{len(cache)} scales for a quantized KV cache are not used: caches stay unquantized")
        tensors = {name: ref for name, ref in tensors.items() if name not in cache}
    _refuse_formats(tensors)
    declared = read_declared(config)
    linears = [name.removesuffix(".weight") for name, shape in shapes.items() if _is_linear(name, shape)]
    packed = {
        module: f"{module}.input_scale" in tensors
        for module in linears
        if (ref := tensors.get(f"{module}.weight")) and ref.dtype == PACKED
    }
    shapes = dict(shapes)
    for module in packed:
        shapes |= _packed_shapes(module, shapes[f"{module}.weight"], tensors[f"{module}.weight"])
        for part in ("weight_scale", "weight_scale_2"):
            if f"{module}.{part}" not in tensors:
                ref = tensors[f"{module}.weight"]
                fix = "the export is incomplete; make it again"
                raise _bad(ref, f"has dtype {ref.dtype}, but {module}.{part} is missing", fix)
    for name, ref in tensors.items():
        module, _, part = name.rpartition(".")
        if part in ("weight_scale", "weight_scale_2", "input_scale"):
            _check_scale(ref, part, module in packed, tensors.get(f"{module}.weight"))
            if ref.shape == (1,) and part != "weight_scale":
                shapes[name] = (1,)
            elif part == "input_scale":
                shapes[name] = ()
    for record in declared:
        record.check({module: tensors[f"{module}.weight"].name.removesuffix(".weight") for module in linears
                      if f"{module}.weight" in tensors}, packed)  # fmt: skip
    for module, activations in packed.items():
        for part in ("weight_scale_2", "input_scale") if activations else ("weight_scale_2",):
            _check_value(tensors[f"{module}.{part}"], shapes[f"{module}.{part}"])
    notes += [note for record in declared for note in record.notes]
    return tensors, shapes, _describe(packed, tensors, notes) if packed or notes else None


def _describe(packed: Mapping[str, bool], tensors: Mapping[str, TensorRef], notes: list[str]) -> Quantization:
    parts = [tensors.get(f"{module}.{part}") for module in packed for part in PARTS]
    return Quantization(
        packed=packed,
        values=sum(2 * tensors[f"{module}.weight"].nbytes for module in packed),
        nbytes=sum(ref.nbytes for ref in parts if ref),
        notes=tuple(dict.fromkeys(notes)),
    )


def packed_dtypes(quantization: Quantization | None) -> dict[str, tuple[str, ...]]:
    """Name → allowed dtypes of the tensors that are not plain floats."""
    modules = quantization.packed if quantization else {}
    return {f"{module}.{part}": (dtype,) for module in modules for part, dtype in PARTS.items()}


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """An embedding is read row by row, which no 4-bit form here serves."""
    return name.endswith(".weight") and len(shape) == 2 and "embed_tokens" not in name


def _refuse_formats(tensors: Mapping[str, TensorRef]) -> None:
    for name, ref in sorted(tensors.items()):
        for pattern, format in FORMATS.items():
            if fnmatch(name, pattern):
                raise UserError(f"tensor {ref.name} ({format}) is not supported", where=ref.file, fix=SUPPORTED)
        if ref.dtype.startswith("F8_") and name.endswith(".weight"):
            raise UserError(f"{ref.name} is FP8 ({ref.dtype}), not supported", where=ref.file, fix=SUPPORTED)


def _packed_shapes(module: str, shape: tuple[int, ...], weight: TensorRef) -> Shapes:
    rows, columns = shape
    if columns % BLOCK:
        raise _bad(weight, f"is packed, but its {columns} inputs are not a multiple of {BLOCK}", SUPPORTED)
    return {
        f"{module}.weight": (rows, columns // 2),
        f"{module}.weight_scale": (rows, columns // BLOCK),
        f"{module}.weight_scale_2": (),
    }


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
