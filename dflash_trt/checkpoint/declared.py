"""What configs say of a checkpoint's quantization: `hf_quant_config.json` and `quantization_config` in config.json.

ModelOpt writes both, the first nested, the second flat, and consumers differ in which they read, so each must agree
with the tensors by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dflash_trt.checkpoint.config import Config, read_config
from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.errors import UserError

NESTED_FILE = "hf_quant_config.json"
FLAT_KEY = "quantization_config"
W4A4, W4A16, MIXED = "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"
MXFP4 = "mxfp4"  # the quant_method of gpt-oss's experts, which are no business of ModelOpt's
NONE = "none"  # only the KV cache is quantized
BITS = 4
REGEX = "re:"  # begins a pattern that is no glob
SUPPORTED = (
    f"supported: {W4A4}, {W4A16}; make it from the unquantized checkpoint with `dflash-trt quantize`, or give that one"
)


@dataclass(frozen=True)
class Declared:
    """One of the two configs. Patterns are `*` globs over module names as the file spells them."""

    config: Config  # the section, for complaints
    algo: str
    exclude_key: str
    excluded: tuple[str, ...]
    layers: Mapping[str, str] = field(default_factory=dict)  # MIXED_PRECISION: module → algorithm
    notes: tuple[str, ...] = ()

    def check(self, linears: Mapping[str, str], packed: Mapping[str, bool]) -> None:
        """`linears`: module as we key it → as the file spells it; `packed`: module → are its activations quantized.

        Raises UserError naming the first module on which config and tensors differ.
        """
        fix = "config and weights are of different revisions; quantize again, or correct the config"
        for module, spelled in linears.items():
            algo = self.algo_of(module, spelled)
            if module in packed and algo is None:
                by = next((p for p in self.excluded if _match(p, module, spelled)), "its absence")
                what = f"excludes {spelled} (by {by}), but that weight is packed NVFP4"
                raise self.config.bad(self.exclude_key, what, fix)
            if module not in packed:
                if algo is not None and module != "lm_head":  # which writers leave alone without a word
                    what = f"does not name {spelled}, but that weight is not packed"
                    raise self.config.bad(self.exclude_key, what, fix)
                continue
            if algo == W4A4 and not packed[module]:
                what = f"is {W4A4} (W4A4), but the input_scale of {spelled} is missing"
                raise self.config.bad(
                    "quant_algo", what, f"calibrate it with `dflash-trt quantize`, or declare it {W4A16}"
                )
            if algo == W4A16 and packed[module]:
                raise self.config.bad("quant_algo", f"is {W4A16}, but the input_scale of {spelled} is there", fix)

    def algo_of(self, module: str, spelled: str) -> str | None:
        if self.algo == MIXED:
            return self.layers.get(spelled, self.layers.get(module))
        excluded = self.algo == NONE or any(_match(pattern, module, spelled) for pattern in self.excluded)
        return None if excluded else self.algo


def read_declared(config: Config, *, mxfp4: bool = False) -> list[Declared]:
    """The declarations of the checkpoint of `config`, none to two of them.

    `mxfp4`: that method is read too, elsewhere (`experts.py`). Raises UserError for methods and algorithms other than
    ModelOpt's NVFP4, by their names.
    """
    found = []
    file = config.file.with_name(NESTED_FILE)
    if file.exists():
        found.append(_read(read_config(file.parent, file.name).section("quantization"), "exclude_modules"))
    if FLAT_KEY in config:
        flat = config.section(FLAT_KEY)
        if "quantization" in flat:  # ModelOpt's export of a drafter puts the nested form there
            return [*found, _read(flat.section("quantization"), "exclude_modules")]
        method = flat.text("quant_method", "modelopt")
        if mxfp4 and method == MXFP4:
            return found
        if not method.startswith("modelopt"):
            raise flat.bad(f"{FLAT_KEY}.quant_method", f"{method.upper()} is not supported", SUPPORTED)
        keys = [key for key in ("ignore", "exclude_modules") if key in flat] or ["ignore"]
        found += [_read(flat, key) for key in keys]  # NVIDIA's quantize_drafter.py writes both
    return found


def _read(section: Config, exclude_key: str) -> Declared:
    cache = section.values.get("kv_cache_quant_algo") or section.values.get("kv_cache_scheme")
    groups = section.section("config_groups")
    algo = section.text("quant_algo", None) or (NONE if cache and not groups.values else _implied(section))
    layers = {}
    if algo == MIXED:
        named = section.section("quantized_layers")
        layers = {name: named.section(name).text("quant_algo") for name in named.values}
    for name in (*layers.values(), *([algo] if algo not in (MIXED, NONE) else [])):
        if name not in (W4A4, W4A16):
            raise section.bad("quant_algo", f"{name} is not supported", SUPPORTED)
    size = section.integer("group_size", BLOCK)
    if size != BLOCK:
        raise section.bad("group_size", f"is {size}; NVFP4 has blocks of {BLOCK}", SUPPORTED)
    _check_groups(section)
    notes = ("a quantized KV cache is asked for; ours stays unquantized",) if cache else ()
    excluded = section.texts(exclude_key, ())
    for pattern in excluded:
        if pattern.startswith(REGEX) and not _compiles(pattern.removeprefix(REGEX)):
            raise section.bad(exclude_key, f"holds {pattern!r}, which is no regular expression")
    return Declared(section, algo, exclude_key, excluded, layers, notes)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _check_groups(section: Config) -> None:
    """`config_groups`, which transformers and vLLM may go by, must not speak of another format."""
    groups = section.section("config_groups")
    for name in groups.values:
        for part in ("weights", "input_activations"):
            numbers = groups.section(name).section(part)
            for key, ours in (("num_bits", BITS), ("group_size", BLOCK)):
                if (value := numbers.integer(key, ours)) != ours:
                    raise section.bad(f"config_groups.{name}.{part}.{key}", f"is {value}, NVFP4 has {ours}", SUPPORTED)


def _implied(section: Config) -> str:
    """Writers without `quant_algo` tell it by the config group (`quant_method: modelopt_fp4`)."""
    groups = section.section("config_groups")
    for name in groups.values:
        return W4A4 if "input_activations" in groups.section(name) else W4A16
    raise UserError("quant_algo is missing", where=section.file, fix=SUPPORTED)


def _match(pattern: str, module: str, spelled: str) -> bool:
    """Does a pattern mean this module, in one of the ways that TensorRT-LLM and vLLM read it?

    A glob over the name or over that of a module around it; after `re:` a regular expression. Consumers mount a drafter
    with or without the prefix `model.`, so either spelling may be meant.
    """
    names = {name for full in (module, spelled) for name in _with_parents(full)}
    if pattern.startswith(REGEX):
        return any(re.fullmatch(pattern.removeprefix(REGEX), name) for name in names)
    return any(fnmatchcase(name, pattern.removesuffix(".*")) or fnmatchcase(name, pattern) for name in names)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
