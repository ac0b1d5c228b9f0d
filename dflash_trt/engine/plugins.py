"""What `--ops plugin` asks of a pair and of the compiler: kernels for its shapes, and TensorRT with them registered."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint import Draft, Pair, Target
from dflash_trt.engine.hardware import TENSORRT, Sm
from dflash_trt.errors import UserError
from dflash_trt.graph.mapping import Mapping, Rank
from dflash_trt.graph.shard import own_config
from dflash_trt.plugins.kernels import Config, check
from dflash_trt.plugins.tensorrt import check_sm, register
from dflash_trt.plugins.tensorrt.lower import lower


def check_pair(models: Pair, dtype: str, mapping: Mapping) -> None:
    """Raises UserError that names what the kernels take, for head widths and types that they do not."""
    for half in (models.target, models.draft):
        if half:
            check(_config(half, dtype, mapping))


def _config(half: Target | Draft, dtype: str, mapping: Mapping) -> Config:
    """Of any rank: they have the same shapes."""
    config = own_config(half, Rank(mapping))
    drafter = isinstance(half, Draft)
    return Config(
        name=str(half.path),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layers=config.layers if drafter else 1,
        dtype=dtype,
        window=max((window or 0 for window in config.windows), default=0),
        both_sides=any(config.windows),
        causal=not drafter,
        k_norm=config.qk_norm,
        vocab=config.vocab,
        eps=config.rms_eps,
    )


def check_build(path: Path, compiler: str, sm: Sm) -> None:
    """Raises UserError unless `compiler` takes plugins, and kernels exist for `sm` and can be compiled."""
    if compiler != TENSORRT:
        raise UserError(
            f"{compiler} takes no plugins", where=path, fix=f"build with {TENSORRT}, or convert with --ops native"
        )
    check_sm(sm.number)
    if find_spec("triton") is None:
        fix = "pip install 'dflash-trt[plugins]', or convert with --ops native"
        raise UserError("Triton, which compiles the plugins' kernels, is not installed", where=path, fix=fix)


def parse_with_plugins(trt: ModuleType, parser: Any, config: Any, graph: Path, sm: int) -> bool:
    """As `parser.parse_from_file`, with the ops of domain `dflash` as plugins. Never run: it needs TensorRT."""
    register(sm)
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    model = ir.load(graph)
    lower(model)
    return parser.parse(ir.to_proto(model).SerializeToString(), str(graph))
