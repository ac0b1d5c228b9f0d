"""The step graph of a DFlash pair, built with onnx-ir at opset 24."""

from dflash_trt.graph.step import build_step
from dflash_trt.graph.write import write_graphs, write_step

__all__ = ["build_step", "write_graphs", "write_step"]
