"""The engine directory: make it from checkpoints, compile its graphs with TensorRT, open and verify it."""

from dflash_trt.engine.compile import build
from dflash_trt.engine.convert import convert
from dflash_trt.engine.load import Engine, open_engine
from dflash_trt.engine.manifest import CompiledEngine, Limits, Manifest

__all__ = ["CompiledEngine", "Engine", "Limits", "Manifest", "build", "convert", "open_engine"]
