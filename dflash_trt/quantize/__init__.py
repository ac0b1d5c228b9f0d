"""NVFP4 checkpoints: what a preset quantizes, calibration through NVIDIA ModelOpt, and a writer that streams.

Only calibration imports torch; a plan and its writing need numpy alone.
"""

from dflash_trt.quantize.plan import Amax, Linear, Plan, make_plan
from dflash_trt.quantize.presets import PRESETS, Preset
from dflash_trt.quantize.write import Layer, Written, write_checkpoint

__all__ = ["PRESETS", "Amax", "Layer", "Linear", "Plan", "Preset", "Written", "make_plan", "write_checkpoint"]
